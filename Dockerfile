# docker build -t pflsim .                            for CPUs
# docker build -t pflsim --build-arg TORCH=cu130 .    for GPUs; run it with --gpus all
# docker run --rm -v "$PWD:/work" pflsim method=fedavg executor=inline
FROM python:3.11-slim
ARG TORCH=cpu
WORKDIR /pflsim
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY pflsim ./pflsim
COPY lightning_modules ./lightning_modules
COPY ray_actors ./ray_actors
COPY configs ./configs
RUN python -m pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/${TORCH} .
WORKDIR /work
ENTRYPOINT ["pflsim"]
