# The training machine as a container: NVIDIA's PyTorch image, whose own torch stays, and what requirements.txt asks for beside it.
#
#   docker build -t cipher .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v /path/on/the/volume:/workspace -it cipher python train.py config/cloud_h100.py
#
# Shards and checkpoints lie on the mounted volume, never in the image: data and out are links to it. Tags whose torch has the
# public grouped_mm, from NVIDIA's release notes (any newer one will do; CUDA 13 needs driver 580 or newer on the host):
#
#   | tag   | torch | CUDA |
#   |-------|-------|------|
#   | 25.12 | 2.10  | 13.1 |
#   | 26.02 | 2.11  | 13.1 |
#   | 26.04 | 2.12  | 13.2 |
ARG TAG=26.02-py3
FROM nvcr.io/nvidia/pytorch:${TAG}

WORKDIR /cipher
COPY requirements.txt ./
# The image pins its torch in a constraint file (PIP_CONSTRAINT); "torch" is left out so that no other one is ever sought.
RUN grep -v '^torch' requirements.txt > /tmp/requirements.txt \
    && python -m pip install --no-cache-dir -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt \
    && python -c "import torch, torch.nn.functional as F; assert hasattr(F, 'grouped_mm'), torch.__version__"
COPY *.py page.html ./
COPY config config
RUN mkdir -p /workspace/data /workspace/out \
    && ln -s /workspace/data data \
    && ln -s /workspace/out out
VOLUME /workspace
CMD ["python", "train.py", "--help"]
