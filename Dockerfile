# A server of dgraph.
#
#   docker build -t dgraph .                                          for a CPU
#   docker build -t dgraph --build-arg TORCH=cu130 .                  for a GPU: docker run --gpus all ...
#   docker run -p 8000:8000 dgraph                                    the embedded model
#   docker run -p 8000:8000 -v ./SDAR-8B-Chat-b32:/model dgraph /model --device cuda --dtype bfloat16
FROM python:3.12-slim

# Which wheels of torch: cpu, or those of a CUDA version, as cu130.
ARG TORCH=cpu

# Inductor compiles with a C++ compiler, and Triton with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dgraph
COPY pyproject.toml README.md LICENSE ./
COPY dgraph dgraph
COPY models models
RUN pip install --no-cache-dir --extra-index-url "https://download.pytorch.org/whl/${TORCH}" ".[serve]"

RUN useradd --create-home dgraph && mkdir /cache && chown dgraph /cache && chmod 700 /cache
USER dgraph
ENV DGRAPH_CACHE=/cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=5m CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"
STOPSIGNAL SIGTERM
ENTRYPOINT ["dgraph", "serve", "--host", "0.0.0.0"]
