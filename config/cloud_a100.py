# The plan's smaller model on one rented A100 80 GB: 84.6M parameters, 23.3M active.
#
# Not yet run on a GPU; figures are limits and estimates (python model.py config/cloud_a100.py prints them).
# Memory: about 7 GiB of 80 with micro-steps of 16 sequences. 10 % of the A100's peak would be 167,000 tokens/s.
# On this card F.grouped_mm is no single kernel: the experts run as batched products. 1.0 GB a checkpoint.
out_dir = "out/cloud_a100"

vocab_size = 32768
d_model = 384
n_layers = 10
n_heads = 6
n_kv_heads = 2
head_dim = 64
n_routed = 24                # per population
n_shared = 2
top_k = 4                    # 2 from each population
expert_d_ff = 96
seq_len = 2048
dropout = 0.1
checkpoint_moe = True

max_tokens = 100_000_000     # the plan's; 1,018 steps
max_hours = 7.5
batch_size = 16              # 98,304 tokens a step in 3 micro-steps
grad_accum = 3
lr = 3e-4
require_bf16 = True
gpu = "A100 A800"
compile = True               # falls back to eager mode by itself
