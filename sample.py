"""Generate text from a trained checkpoint, in the terminal, as it comes.

    python sample.py                                           the newest run below out/, its best checkpoint
    python sample.py config/local_cpu.py --prompt="def fib(n):" --temperature=0.6
    python sample.py --prompt="def area(r):" --suffix="    return area"     fills in what stands between (after fim_share in prepare.py)
    python sample.py --checkpoint=out/cloud_h100/step_00012000.pt --max_new_tokens=500

Reads the checkpoint (its hash is checked, weights alone are loaded) and the tokenizer.json beside it. Runs in FP32 on the
CPU or a small GPU, in BF16 where the GPU has it. The text goes to standard output, everything else to standard error.
"""
import codecs
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch

import config
from config import UserError
from model import autocast, find_checkpoint, load_checkpoint, pick_device
from tokenizer import encode, load_tokenizer, token_bytes

# settings
out_dir = "out/cipher"               # the run; where it has no checkpoint, the newest run below out/
checkpoint: str | None = None        # a file or a run's folder; None = the run's best, else its newest
data_dir = "data/cipher"             # where a tokenizer.json is sought if none lies beside the checkpoint
device = "auto"
dtype = "auto"
prompt = "def"                       # "" begins a new document; a blank at the end would be a token of its own
suffix: str | None = None            # text behind the gap; None = the text goes on after the prompt
max_new_tokens = 200                 # at most; the context (seq_len) may end first
temperature = 0.8                    # 0 = always the likeliest token
sample_top_k: int | None = 50        # draw from so many likeliest tokens; None or 0 = all
sample_top_p: float | None = 0.95    # and from the fewest that reach this probability; None = all
seed = 1337


def check_settings() -> None:
    rules = [(max_new_tokens >= 1, f"max_new_tokens={max_new_tokens} must be 1 or more"),
             (temperature >= 0, f"temperature={temperature} must not be negative (0 = the likeliest token)"),
             (sample_top_k is None or sample_top_k >= 0, f"sample_top_k={sample_top_k} must not be negative (0 or None = all)"),
             (sample_top_p is None or 0 < sample_top_p <= 1, f"sample_top_p={sample_top_p} must be above 0 and at most 1 (None = all)"),
             (0 <= seed < 1 << 63, f"seed={seed} must be from 0 to 2^63 - 1")]
    if mistakes := [text for good, text in rules if not good]:
        raise UserError("\n".join(mistakes))


def find_tokenizer(file: Path, settings: dict) -> Path:
    """The tokenizer.json beside a checkpoint, else in the data folder it was trained from, else in data_dir."""
    places = [file.parent, Path(settings["data_dir"]), Path(data_dir)]
    return next((p / "tokenizer.json" for p in places if (p / "tokenizer.json").is_file()), file.parent / "tokenizer.json")


class TextStream:
    """Turn ids into text one by one; the bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tok):
        self.bytes_of = token_bytes(tok)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.bytes_of[token])

    def close(self) -> str:
        return self.decoder.decode(b"", final=True)


def main():
    with redirect_stdout(sys.stderr):
        config.override(globals())
        check_settings()
        place, number, said = pick_device(device, dtype)
        file = find_checkpoint(checkpoint, out_dir)
        model, settings = load_checkpoint(file, place)
        tok = load_tokenizer(find_tokenizer(file, settings), settings["tokenizer_sha256"])
        print(f"{file}: step {settings['step']}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; {said}")

    if broken := [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor).all()]:
        raise UserError(f"{file}: {broken[0]} is not finite, the run that made it broke down - take an earlier checkpoint")
    if suffix is None:
        ids = [tok.token_to_id("<s>"), *encode(tok, prompt)]
    else:                                           # the first of prepare.lay_out's two orders for filling in the middle
        before, after, middle = map(tok.token_to_id, ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
        ids = [tok.token_to_id("<s>"), before, *encode(tok, prompt), after, *encode(tok, suffix), middle]
    room = model.config.seq_len - len(ids)
    if room < 1:
        raise UserError(f"prompt{'' if suffix is None else ' and suffix'}: {len(ids)} tokens with <s>, and the context is "
                        f"{model.config.seq_len} (seq_len) - shorten it to {model.config.seq_len - 1} or fewer")
    stop_id, stream, n, started = tok.token_to_id("</s>"), TextStream(tok), 0, time.perf_counter()
    print(prompt, end="", flush=True)
    reason = f"max_new_tokens={max_new_tokens} reached" if max_new_tokens <= room else f"the context of {model.config.seq_len} tokens is full"
    with autocast(place, number):
        for new in model.stream(torch.tensor([ids], device=place), max_new_tokens, temperature, sample_top_k, sample_top_p, seed, stop_id):
            if new.item() == stop_id:
                reason = "the model ended the document"
                break
            n += 1
            print(stream.push(new.item()), end="", flush=True)
    print(stream.close() + (suffix or ""), flush=True)
    seconds = time.perf_counter() - started
    print(f"{n} tokens in {seconds:.1f} s, {n / seconds:.1f} tokens/s; {reason}", file=sys.stderr)


if __name__ == "__main__":
    config.run(main)
