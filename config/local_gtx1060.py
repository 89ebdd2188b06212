# A GTX 1060 6 GB (Pascal) or another small GPU, FP32. Pascal needs PyTorch's CUDA 12.6 wheels, below 2.15:
#     pip install "torch>=2.10,<2.15" --index-url https://download.pytorch.org/whl/cu126
#
# Nothing here was run on that card. By arithmetic (python model.py config/local_gtx1060.py): 13.9M parameters,
# 5.7M active, about 1 GB of its memory; 4.4 FP32 TFLOP/s at most (NVIDIA's data sheet) allow about 114,000
# tokens/s, so a tenth of that, 11,000 tokens/s, would take 18 minutes.
data_dir = "data/local_cpu"
out_dir = "out/local_gtx1060"

vocab_size = 8192
d_model = 256
n_layers = 6
n_heads = 4
n_kv_heads = 2
head_dim = 64
n_routed = 8
n_shared = 2
top_k = 2
expert_d_ff = 128
seq_len = 512
tie_embeddings = True
dropout = 0.1
checkpoint_moe = False

max_tokens = 12_000_000      # just under 4 passes over the standard library; prepare more text for more
batch_size = 8               # 8,192 tokens a step
grad_accum = 2
lr = 1e-3
eval_interval = 100
eval_tokens = 150_000
checkpoint_minutes = 10.0
