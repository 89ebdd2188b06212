# The plan's model on one rented H100 80 GB: 197.5M parameters, 39.2M active.
#
# Not yet run on a GPU; figures are limits and estimates (python model.py config/cloud_h100.py prints them).
# Memory: about 11 GiB of 80 with micro-steps of 16 sequences. At 10 % of the H100's peak it would train 318,000
# tokens/s, so 7.5 hours would buy 8.6 G tokens: it is the text that is short, not the time. Prepare at least a
# quarter of max_tokens (train.py refuses more than max_passes over it). 2.4 GB a checkpoint.
out_dir = "out/cloud_h100"

vocab_size = 32768
d_model = 512
n_layers = 12
n_heads = 8
n_kv_heads = 2
head_dim = 64
n_routed = 32                # per population
n_shared = 2
top_k = 4                    # 2 from each population
expert_d_ff = 128
seq_len = 2048
dropout = 0.1
checkpoint_moe = True

max_tokens = 100_000_000     # the plan's; 1,018 steps
max_hours = 7.5
batch_size = 16              # 98,304 tokens a step in 3 micro-steps
grad_accum = 3
lr = 3e-4
require_bf16 = True
gpu = "H100 H200 GH200 B200 B300"
compile = True               # falls back to eager mode by itself
