"""Is it any good? A scorecard of a trained checkpoint, with a bar, a verdict and a remedy for each check.

    python evaluate.py                                  the newest run below out/, its best checkpoint
    python evaluate.py config/local_cpu.py --strict=True     exit code 1 if a check fails

Reads the checkpoint and the shards it was trained on (data_dir, or the folder it names); writes scorecard.json beside the checkpoint.
Losses are in nats per token; perplexity is exp of that; bits per byte compare models with other tokenizers.
"""
import json
import math
from pathlib import Path

import numpy as np
import torch

import config
from config import UserError
from model import POPULATIONS, KVCache, P, autocast, choose_branch, find_checkpoint, load_checkpoint, mean_ce, pick_device
from prepare import TokenStream, read_manifest
from tokenizer import load_tokenizer, token_bytes

# settings
data_dir = "data/cipher"
out_dir = "out/cipher"
checkpoint: str | None = None     # a file or a run's folder; None = the run's best, else its newest
device = "auto"
dtype = "auto"
batch_size = 16                   # sequences at a time
eval_tokens = 500_000             # of the validation split, the windows training used
strict = False                    # True: exit code 1 if a check fails

UNIGRAM_TOKENS = 50_000_000       # of the training split, enough to estimate token frequencies


# ----------------------------------------------------------------------------------------------------------
# Checks: each returns rows (check, value, bar, passed or None, remedy)
# ----------------------------------------------------------------------------------------------------------

def check_weights(model) -> list:
    broken = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    return [("weights not finite", len(broken), "= 0", not broken,
             f"first: {broken[0]} - take an earlier checkpoint, train on with a lower lr" if broken else "")]


def find_data(settings: dict) -> str:
    """data_dir, or the checkpoint's own where that alone was made with the checkpoint's tokenizer."""
    for folder in (data_dir, settings["data_dir"]):
        try:
            if read_manifest(folder)["tokenizer_sha256"] == settings["tokenizer_sha256"]:
                return folder
        except UserError:
            continue
    return data_dir                                  # its own error is the one to show


def check_tokenizer(settings: dict, file: Path, manifest: dict) -> list:
    """The checkpoint, the manifest and the file beside the checkpoint must name one tokenizer; the data's was checked at loading."""
    hashes = {settings["tokenizer_sha256"], manifest["tokenizer_sha256"]}
    if (beside := file.parent / "tokenizer.json").is_file():
        hashes.add(config.sha256_file(beside))
    return [("different tokenizers in use", len(hashes), "= 1", len(hashes) == 1, "evaluate with the data the checkpoint was trained on")]


def unigram_ce(train: TokenStream, targets: torch.Tensor, vocab_size: int) -> float:
    """Cross-entropy in nats per token of token frequencies counted on the training split (add-one smoothing)."""
    counts = np.ones(vocab_size)
    for start in range(0, min(train.n_tokens, UNIGRAM_TOKENS), 1 << 22):
        counts += np.bincount(train.tokens(start, min(train.n_tokens, start + (1 << 22))).numpy(), minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[targets.numpy()].mean())


def check_loss(model, val, train, windows, context, tok) -> list:
    ce = mean_ce(model, windows(), context)
    targets = torch.cat([t.flatten() for _, t in windows()])
    lengths = np.array([len(b) for b in token_bytes(tok)])
    per_byte = float(targets.numel() / lengths[targets.numpy()].sum() / math.log(2))    # nats per token -> bits per byte
    base = unigram_ce(train, targets, len(lengths)) * per_byte
    return [("validation ce, nats per token", ce, f"< ln V = {math.log(len(lengths)):.2f}", ce < math.log(len(lengths)), "train longer"),
            ("perplexity = exp(ce)", math.exp(ce), "", None, ""),
            ("bits per byte", ce * per_byte, f"< {0.75 * base:.3f}", ce * per_byte < 0.75 * base,
             f"the bar is 25 % below the {base:.3f} of token frequencies alone: train longer, or look at the data")]


@torch.no_grad()
def check_routing(model, windows, context) -> list:
    """Loads over the validation windows, the worst layer of each figure; bars from the plan where uniform allows them."""
    E = model.config.n_routed
    load, overlap, n = 0, 0.0, 0
    for inputs, targets in windows():
        with context:
            result = model(inputs.to(model.rope.device), targets.to(model.rope.device))
        load, overlap, n = load + result["load"], overlap + result["overlap"].item() * len(inputs), n + len(inputs)
    share = load.double() / load.sum(-1, keepdim=True)                               # [L, P, E]
    entropy = -torch.xlogy(share, share).sum(-1) / math.log(max(2, E))               # [L, P]
    print(f"\n  {'layer':<6}" + "".join(f"{name + ' load shares, largest / smallest / entropy':<56}" for name in POPULATIONS))
    for layer in range(len(share)):
        print(f"  {layer:<6}" + "".join(f"{share[layer, p].max():>12.3f} /{share[layer, p].min():>7.4f} /{entropy[layer, p]:>6.3f}{'':<26}" for p in range(P)))
    worst = share.flatten(1).amax(1).argmax().item()
    dead, largest = int((load == 0).sum()), share.max().item()
    applies = 2.5 / E <= 0.20                        # with fewer experts 0.20 would forbid what 2.5 times the mean allows
    return [(f"largest load share (layer {worst})", largest, "< 0.2" if applies else f"none: even is {1 / E:.3f}",
             largest < 0.20 if applies else None, "raise bias_update_rate, or train longer before the cooldown"),
            ("largest load / mean load", E * largest, "< 2.5", E * largest < 2.5, "raise bias_update_rate"),
            ("dead experts", dead, "= 0", dead == 0, "raise bias_update_rate; with little data use fewer experts"),
            ("load entropy, least layer (1 = even)", entropy.min().item(), "> 0.9", entropy.min().item() > 0.9, "raise bias_update_rate"),
            ("overlap of the populations", overlap / n, "< 0.3", overlap / n < 0.3, "raise ortho_weight: the populations are merging")]


def check_ablation(model, windows, context) -> list:
    """What validation ce rises by when a population falls silent, its gates zero, the other's unchanged."""
    whole, rows = mean_ce(model, windows(), context), []
    for p, name in enumerate(POPULATIONS):
        cost = mean_ce(model, windows(), context, silence=p) - whole
        renormalised = mean_ce(model, windows(), context, silence=p, renormalise=True) - whole
        rows += [(f"ce without {name}, rise", cost, "> 0", cost > 0, "this population adds nothing: check routing and overlap"),
                 ("  with the other's gates renormalised", renormalised, "", None, "")]
    return rows


@torch.no_grad()
def check_generation(model, windows) -> list:
    """Generating with a KV cache must give the logits of a full pass, and so the same tokens."""
    inputs = next(iter(windows()))[0][:2, :min(128, model.config.seq_len)].to(model.rope.device)
    full = model(inputs, all_logits=True)["logits"]
    cache = KVCache(model.config, len(inputs), inputs.size(1), inputs.device, torch.float32)
    pieces = [model(inputs[:, a:b], all_logits=True, cache=cache)["logits"]
              for a, b in [(0, inputs.size(1) // 2)] + [(t, t + 1) for t in range(inputs.size(1) // 2, inputs.size(1))]]
    difference = (torch.cat(pieces, 1) - full).abs().max().item()
    different = (torch.cat(pieces, 1).argmax(-1) != full.argmax(-1)).sum().item()
    return [("cached against full logits, largest difference", difference, "< 0.001", difference < 1e-3, "a defect: report it"),
            ("  greedy tokens that differ", different, "= 0", different == 0, "a defect: report it")]


# ----------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------

def main():
    config.override(globals())
    if min(batch_size, eval_tokens) < 1:
        raise UserError(f"batch_size={batch_size} and eval_tokens={eval_tokens} must be 1 or more")
    place, number, said = pick_device(device, dtype)
    file = find_checkpoint(checkpoint, out_dir)
    model, settings = load_checkpoint(file, place)
    choose_branch(model, place, number)
    folder = find_data(settings)
    manifest = read_manifest(folder)
    tok = load_tokenizer(Path(folder) / "tokenizer.json", settings["tokenizer_sha256"])
    val, train = (TokenStream(folder, split, model.config.seq_len, 0) for split in ("val", "train"))
    n = min(val.n_windows, max(1, eval_tokens // model.config.seq_len))
    print(f"{file}: step {settings['step']}; {said}; {n * model.config.seq_len:,} validation tokens of {folder}")

    def windows(share=1.0):
        last = max(1, round(n * share))
        return (val.batch(first, min(batch_size, last - first)) for first in range(0, last, batch_size))

    context = autocast(place, number)
    rows = check_weights(model) + check_tokenizer(settings, file, manifest) + check_loss(model, val, train, windows, context, tok)
    if model.config.n_routed:
        rows += check_routing(model, windows, context) + check_ablation(model, lambda: windows(0.5), context)
    choose_branch(model, place, torch.float32)
    rows += check_generation(model, windows)

    print(f"\n  {'check':<48} {'value':>10}   {'bar':<18} verdict")
    for check, value, bar, passed, remedy in rows:
        shown = f"{value:>10}" if isinstance(value, int) else f"{value:>10.4g}"
        print(f"  {check:<48} {shown}   {bar:<18} {'' if passed is None else 'pass' if passed else 'FAIL: ' + remedy}")
    failed = [row[0].strip() for row in rows if row[3] is False]
    print(f"\n{len([r for r in rows if r[3]])} passed, {len(failed)} failed" + (": " + "; ".join(failed) if failed else ""))
    config.write_text(file.parent / "scorecard.json", json.dumps(dict(
        checkpoint=file.name, step=settings["step"], checks=[dict(zip(("check", "value", "bar", "passed", "remedy"), row)) for row in rows]), indent=1) + "\n")
    print(f"written to {file.parent / 'scorecard.json'}")
    if failed and strict:
        raise SystemExit(1)


if __name__ == "__main__":
    config.run(main)
