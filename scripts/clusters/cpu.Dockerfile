# An image for CPUs. Build it from the checkout: docker build -f scripts/clusters/cpu.Dockerfile -t rlcli:cpu .
FROM python:3.11-slim
# bubblewrap: the sandbox for code verifiers. wget: Kubernetes asks Ray's health with it. procps: rayjob.yaml stops
# a run with it. tini: reaps what outlives a run.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap procps tini wget git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rlcli
COPY . .
ENV RLCLI_EXTRA=cpu PATH=/opt/rlcli/.venv/bin:$PATH
RUN scripts/env && .venv/bin/python -m uv pip install "ray[default]==$(.venv/bin/python -c 'import ray; print(ray.__version__)')"
WORKDIR /work
ENTRYPOINT ["tini", "--"]
CMD ["rlcli", "--help"]
