# The plan's large model on one rented H100 80 GB: 636.7M parameters, 72.6M active.
#
# Not yet run on a GPU; figures are limits and estimates (python model.py config/cloud_600m.py prints them).
# Memory: about 19 GiB of 80 with micro-steps of 16 sequences. At 10 % of the H100's peak it would train 193,000
# tokens/s. 7.6 GB a checkpoint: mind the disk, or set keep_checkpoints.
out_dir = "out/cloud_600m"

vocab_size = 32768
d_model = 512
n_layers = 12
n_heads = 8
n_kv_heads = 2
head_dim = 64
n_routed = 62                # per population
n_shared = 2
top_k = 8                    # 4 from each population
expert_d_ff = 256
seq_len = 2048
dropout = 0.1
checkpoint_moe = True

max_tokens = 1_000_000_000   # 10,173 steps
max_hours = 7.5
batch_size = 16              # 98,304 tokens a step in 3 micro-steps
grad_accum = 3
lr = 3e-4
require_bf16 = True
gpu = "H100 H200 GH200 B200 B300"
compile = True               # falls back to eager mode by itself
