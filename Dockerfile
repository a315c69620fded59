# The image of lmi. The targets are cpu (the default, with the embedded engine), torch (the same with torch, for families
# that only transformers' modules know, GPUs and pickled weights), vllm and trtllm; `scripts/build-image` builds them.
#
# BASE_IMAGE is the base of the image: for cpu any Debian or Ubuntu with Python 3.11 or newer, for vllm preferably one
# with CUDA, or with vllm, which it keeps. For trtllm it must have TensorRT-LLM, as the vendor's release container has,
# on which `scripts/build-image --target trtllm` builds.
# TORCH_INDEX_URL names a package index only for torch (CPU or CUDA builds), in target torch. Without it torch comes from
# the same index as the rest.
#
# Two optional build secrets, for a machine behind its own package index or proxy: `pip_conf` (a pip.conf) and
# `ca_bundle` (the certificates that pip trusts). Neither is in any layer.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Every target runs on this stage. `scripts/build-image` adds version and revision as labels. lmi is process 1: it
# forwards signals and reaps, so the image has no init.
FROM ${BASE_IMAGE} AS runtime
LABEL org.opencontainers.image.title="lmi" \
      org.opencontainers.image.description="Serves a large language model behind the contracts its clients already speak" \
      org.opencontainers.image.licenses="Apache-2.0" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="true"
# The image starts as root, because platforms mount as root, and OPTION_USER then names the user of what clients reach
# (docs/security.md). It runs as any user too, known or not, and with a read-only root filesystem: files that must be
# written go to /tmp. The bytecode is compiled at build time.
ENV PATH="/opt/lmi/bin:${PATH}" \
    SERVING_HOST=0.0.0.0 \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    HF_HOME=/tmp/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    DO_NOT_TRACK=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/ml
EXPOSE 8080
STOPSIGNAL SIGTERM
# A server's folder has its URL, wherever its port was set.
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python3", "-ISc", "import glob, ssl, tempfile, urllib.request as r; o = r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())); [o.open(open(url).read() + '/ping', timeout=2) for url in glob.glob(tempfile.gettempdir() + '/lmi-*/url')] or exit('no server runs')"]
ENTRYPOINT ["lmi"]
CMD ["serve"]

# The image ships pip, which installs what the requirements.txt of a model names, and no compiler. The one here builds
# the native kernels of the embedded engine, for every CPU of this architecture.
FROM runtime AS build-cpu
ENV PYTHONDONTWRITEBYTECODE=
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/lmi
COPY scripts/locks/base.txt scripts/locks/aws.txt scripts/locks/otel.txt scripts/locks/build.txt /src/locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle \
    --mount=type=cache,target=/tmp/cache/pip \
    /opt/lmi/bin/pip install --no-deps --require-hashes --only-binary=:all: \
        -r /src/locks/base.txt -r /src/locks/aws.txt -r /src/locks/otel.txt \
    && /opt/lmi/bin/pip install --no-deps --require-hashes --only-binary=:all: --target /build -r /src/locks/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY scripts/build-native scripts/wheel_hook.py /src/scripts/
COPY handlers /src/handlers
COPY lmi /src/lmi
RUN PYTHONPATH=/build /opt/lmi/bin/pip install --no-deps --no-build-isolation --no-index --root /own /src

# torch is outside the lock, because its CPU and CUDA builds share a name and a version. Its dependencies are in the lock.
FROM build-cpu AS build-torch
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL
COPY scripts/locks/torch.txt /src/locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle \
    --mount=type=cache,target=/tmp/cache/pip \
    /opt/lmi/bin/pip install --no-deps --require-hashes --only-binary=:all: -r /src/locks/torch.txt \
    && /opt/lmi/bin/pip install --only-binary=:all: "torch==${TORCH_VERSION}" \
        ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"}

FROM runtime AS torch
COPY --from=build-torch /opt/lmi /opt/lmi
COPY --from=build-torch /own /

# Engines that compile small kernels while they run need a C compiler and Python's headers in their image.
FROM runtime AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM gpu AS build-gpu
ENV PYTHONDONTWRITEBYTECODE=
RUN python3 -m venv --system-site-packages /opt/lmi
COPY pyproject.toml README.md LICENSE /src/
COPY scripts/build-native scripts/wheel_hook.py /src/scripts/
COPY handlers /src/handlers
COPY lmi /src/lmi

# The engines pin hundreds of packages, which are not in the lock.
FROM build-gpu AS build-vllm
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle \
    --mount=type=cache,target=/tmp/cache/pip \
    /opt/lmi/bin/pip install "/src[aws,otel,vllm]"

FROM gpu AS vllm
COPY --from=build-vllm /opt/lmi /opt/lmi

# TensorRT-LLM is the base's, as are the torch, the Open MPI and the Python that it was built for. Nothing installs it
# here: its public package is a stub that fetches the real one from the vendor. The base's PIP_CONSTRAINT is for the
# base's own packages.
FROM runtime AS build-trtllm
ENV PYTHONDONTWRITEBYTECODE=
RUN python3 -c "from importlib.metadata import version as v; assert tuple(map(int, v('tensorrt_llm').split('.')[:2])) >= (1, 2)" 2>/dev/null \
    || { echo "lmi: the base has no TensorRT-LLM 1.2 or newer; give one that has: --build-arg BASE_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1" >&2; exit 1; }
# hadolint ignore=DL3008
RUN python3 -c "import ensurepip" 2>/dev/null \
    || { apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
        && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv --system-site-packages /opt/lmi
COPY scripts/locks/base.txt scripts/locks/aws.txt scripts/locks/otel.txt scripts/locks/build.txt /src/locks/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle \
    --mount=type=cache,target=/tmp/cache/pip \
    env --unset=PIP_CONSTRAINT /opt/lmi/bin/pip install --no-deps --require-hashes --only-binary=:all: \
        -r /src/locks/base.txt -r /src/locks/aws.txt -r /src/locks/otel.txt \
    && env --unset=PIP_CONSTRAINT /opt/lmi/bin/pip install --no-deps --require-hashes --only-binary=:all: --target /build \
        -r /src/locks/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY scripts/build-native scripts/wheel_hook.py /src/scripts/
COPY handlers /src/handlers
COPY lmi /src/lmi
RUN env --unset=PIP_CONSTRAINT PYTHONPATH=/build /opt/lmi/bin/pip install --no-deps --no-build-isolation --no-index /src
# The engine's process takes what the base and lmi both have from the base (handlers/lmi_trtllm/about.py).
RUN PYTHONPATH="$(/opt/lmi/bin/python -P -c "import os, handlers.lmi_trtllm.about as a; print(a.base_packages(os.environ).get('PYTHONPATH', ''))")" \
    /opt/lmi/bin/python -P -c "import lmi.engine.worker, importlib.util as u; assert u.find_spec('tensorrt_llm')"

# The vendor's containers set the paths of libraries, and the CUDA that fits the driver, in a file that only shells read.
FROM runtime AS trtllm
COPY --from=build-trtllm /opt/lmi /opt/lmi
ENV OPTION_ROLLING_BATCH=trtllm
ENTRYPOINT ["bash", "-c", "exec lmi \"$@\"", "lmi"]
CMD ["serve"]

# There are two layers: what lmi needs is large and changes seldom, lmi itself is small.
FROM runtime AS cpu
COPY --from=build-cpu /opt/lmi /opt/lmi
COPY --from=build-cpu /own /
