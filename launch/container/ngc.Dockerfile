# The training program in NVIDIA's own container, whose torch, Apex and TransformerEngine stay as they are.
#
#   docker build -f launch/container/ngc.Dockerfile --build-arg BASE=nvcr.io/nvidia/pytorch:26.01-py3 -t alto-ngc .
#
# The training program needs a tag with torch 2.10 or newer; the optimizer alone needs 2.6.
ARG BASE=nvcr.io/nvidia/pytorch:26.01-py3
FROM ${BASE}

WORKDIR /opt/alto
COPY . .
# To pip, 2.10.0a0+...nv is older than 2.10, so it would replace NVIDIA's torch: our package comes without its
# requirements, and those without torch. The check at import takes such a version for what it is.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps . \
    && pip install --no-cache-dir deepspeed megatron-core 'filelock>=3.30' matplotlib numpy 'pydantic>=2.5' pyyaml \
        'pytorch_optimizer>=3.8' tensorboard tokenizers tqdm transformers \
    && python -c 'import torch; assert "nv" in torch.__version__, torch.__version__'
ENV PY=python
WORKDIR /workspace/alto
RUN ln -s /opt/alto/launch /opt/alto/configs .
CMD ["alto", "doctor"]
