# April on machines without accelerators.
#
#   docker build --file launch/images/cpu.Dockerfile --tag april:cpu --build-arg TORCH_INDEX=... .
#
# TORCH_INDEX: where torch's CPU wheels are, as on PyTorch's own "Get started" page; needed where pip would get CUDA's.
ARG BASE=docker.io/library/debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS build
ARG TORCH_INDEX=
ENV PIP_COMPILE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/april
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY launch launch
COPY april april
RUN APRIL_TORCH_INDEX="${TORCH_INDEX}" launch/install.sh all && .venv/bin/python -m compileall -q april

FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --user-group --create-home april
COPY --from=build /opt/april /opt/april
ENV PATH=/opt/april/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /home/april
USER 1000:1000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python3", "/opt/april/launch/images/health.py"]
CMD ["april", "--help"]
