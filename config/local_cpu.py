# A first model on any machine: two CPU cores, 2 GB of memory, no GPU, no network.
#
#     python prepare.py config/local_cpu.py && python train.py config/local_cpu.py && python sample.py config/local_cpu.py
#
data_dir = "data/local_cpu"
out_dir = "out/local_cpu"

# 4.1M parameters, 1.6M active
vocab_size = 8192
d_model = 128
n_layers = 4
n_heads = 4
n_kv_heads = 2
head_dim = 32
n_routed = 8
n_shared = 2
top_k = 2
expert_d_ff = 64
seq_len = 256
tie_embeddings = False       # 0.7 % lower validation loss than tied at equal tokens, and as fast
dropout = 0.0                # no text is seen twice
checkpoint_moe = False       # memory is not short

max_tokens = 2_500_000       # 0.8 passes over the standard library
batch_size = 8               # 2,048 tokens a step
grad_accum = 1
lr = 2e-3                    # small models bear more than the plan's 3e-4
warmup_steps = 100
eval_interval = 250
eval_tokens = 100_000
log_interval = 25
checkpoint_minutes = 5.0
