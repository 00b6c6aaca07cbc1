# MoH-LM on NVIDIA GPUs. The wheels of torch bring CUDA; the machine needs its driver and the container toolkit.
#
#     docker build -t moh-lm .
#     docker run --rm --gpus all --ipc host -v "$PWD/data:/moh-lm/data" -v "$PWD/runs:/moh-lm/runs" moh-lm \
#         bash launch/pretrain_llm_s.sh  # saves on `docker stop -t 120`, which deepspeed as process 1 ignores
FROM python:3.12-slim

# Triton compiles with gcc while it runs; the deepspeed launcher reaches other nodes by pdsh and ssh.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*
# The set-up commands install into the Python of the image, and find there that it is done.
ENV VIRTUAL_ENV=/usr/local PIP_NO_CACHE_DIR=1
WORKDIR /moh-lm
COPY launch/environment.sh launch/
RUN pip install "torch==$(sed -n 's/^TORCH_VERSION=//p' launch/environment.sh)"
COPY . .
RUN bash -c 'for extra in hf gpu plot; do source launch/environment.sh $extra || exit; done'
CMD ["python", "-m", "moh_lm.pretrain", "--help"]
