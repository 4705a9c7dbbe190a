# April on AMD accelerators.
#
#   docker build --file launch/images/rocm.Dockerfile --tag april:rocm --build-arg TORCH_INDEX=... .
#
# TORCH_INDEX: where torch's ROCm wheels are, as on PyTorch's own "Get started" page. They bring ROCm's libraries, RCCL among
# them; the machine brings its driver. Servers of engines are AMD's own images, which workers attach to (engine.url).
ARG BASE=docker.io/library/debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS build
ARG TORCH_INDEX
RUN test -n "${TORCH_INDEX}" || { echo "give --build-arg TORCH_INDEX, the index of torch's ROCm wheels" >&2; exit 1; }
ENV PIP_COMPILE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/april
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY launch launch
COPY april april
RUN APRIL_TORCH_INDEX="${TORCH_INDEX}" APRIL_ALLOW_CUDA=1 launch/install.sh all \
    && .venv/bin/python -m compileall -q april
RUN .venv/bin/python -c "import torch; assert torch.version.hip, 'TORCH_INDEX has no build for ROCm'"

FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev libnuma1 python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --user-group --create-home april
COPY --from=build /opt/april /opt/april
ENV PATH=/opt/april/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /home/april
USER 1000:1000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python3", "/opt/april/launch/images/health.py"]
CMD ["april", "--help"]
