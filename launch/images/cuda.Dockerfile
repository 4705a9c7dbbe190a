# April on NVIDIA accelerators, with SGLang.
#
#   docker build --file launch/images/cuda.Dockerfile --tag april:cuda .
#
# SERVER: sglang, vllm or none. CUDA and NCCL come with torch's wheels; the machine brings its driver. Where a server
# compiles kernels at its first use, give a BASE that has nvcc, an image of NVIDIA's with "devel" in its tag.
ARG BASE=docker.io/library/debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS build
ARG SERVER=sglang
ENV PIP_COMPILE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/april
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY launch launch
RUN if [ "${SERVER}" != none ]; then APRIL_ALLOW_CUDA=1 "launch/install-${SERVER}.sh"; fi
COPY april april
RUN APRIL_ALLOW_CUDA=1 launch/install.sh all && .venv/bin/python -m compileall -q april

FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev libnuma1 python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --user-group --create-home april
COPY --from=build /opt/april /opt/april
ENV PATH=/opt/april/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /home/april
USER 1000:1000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python3", "/opt/april/launch/images/health.py"]
CMD ["april", "--help"]
