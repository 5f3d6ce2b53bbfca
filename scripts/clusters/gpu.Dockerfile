# An image for NVIDIA GPUs. Build it from the checkout: docker build -f scripts/clusters/gpu.Dockerfile -t rlcli:gpu .
# The pins bring CUDA's libraries; the driver is the machine's. gcc and Python.h: Triton compiles while a run starts.
FROM python:3.11
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap procps tini wget git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rlcli
COPY . .
ENV RLCLI_EXTRA=gpu PATH=/opt/rlcli/.venv/bin:$PATH
RUN scripts/env && .venv/bin/python -m uv pip install "ray[default]==$(.venv/bin/python -c 'import ray; print(ray.__version__)')"
WORKDIR /work
ENTRYPOINT ["tini", "--"]
CMD ["rlcli", "--help"]
