# dualsft with CUDA: docker build -t dualsft . && docker run --gpus all -v "$PWD:/work" dualsft --help
# torch's wheels bring CUDA; the host needs NVIDIA's driver and container toolkit. Triton compiles
# small launchers when a kernel is first used, which is what gcc is for.
FROM python:3.12-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dualsft
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY docs docs
RUN pip install --no-cache-dir torch==2.13.0 \
    && pip install --no-cache-dir --constraint constraints.txt ".[data,eval,peft]"

# models and settings of earlier runs: mount a volume here to keep them
ENV DUALSFT_CACHE=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home --uid 1000 user && mkdir --mode=777 /cache /work && chown 1000 /cache /work
USER 1000
WORKDIR /work
ENTRYPOINT ["dualsft"]
CMD ["--help"]
