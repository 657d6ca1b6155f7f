# syntax=docker/dockerfile:1
# Two images. With NVIDIA GPUs, SGLang's own image is the base; its SGLang, torch and CUDA stay as they are:
#   docker build --target cuda --tag verl-server .
#   docker run --gpus all --init --shm-size 32g -v /models:/models verl-server doctor /models/policy
# On a machine without GPUs, the environment of requirements.lock:
#   docker build --target cpu --tag verl-server:cpu .
#   docker run --init --shm-size 4g verl-server:cpu model smollm2 /tmp/model

ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir build==1.3.0 && python -m build --wheel --outdir /dist

FROM ${SGLANG_IMAGE} AS cuda
# What the base has stays: the constraints are its own versions.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip list --format freeze --exclude-editable > /tmp/base.txt && \
    pip install --no-cache-dir --constraint /tmp/base.txt /dist/*.whl && \
    rm /tmp/base.txt
ENTRYPOINT ["verl-server"]
CMD ["doctor"]

FROM ${PYTHON_IMAGE} AS cpu
# torch.compile and the kernels of SGLang for CPUs need a compiler; torch on several NUMA nodes needs libnuma.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends build-essential libnuma1 && \
    rm -rf /var/lib/apt/lists/*
COPY requirements.lock /tmp/requirements.lock
RUN pip install --no-cache-dir uv==0.13.8 && \
    uv pip install --system --no-cache --compile-bytecode --requirement /tmp/requirements.lock
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    uv pip install --system --no-cache --no-deps /dist/*.whl
ENTRYPOINT ["verl-server"]
CMD ["doctor"]
