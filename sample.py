"""Generate text from a trained checkpoint: in the terminal as it comes, in a loop, or as a server.

    python sample.py                                           the newest run below out/, its best checkpoint
    python sample.py config/local_cpu.py --prompt="def fib(n):" --temperature=0.6
    python sample.py --prompt="def area(r):" --suffix="    return area"     fills in what stands between (after fim_share in prepare.py)
    python sample.py --chat=True                               one prompt after another, each going on from the last
    python sample.py --serve=8000                              the OpenAI completions API, and a page to try it, on this machine alone

Reads the checkpoint (its hash is checked, weights alone are loaded) and the tokenizer.json beside it. Runs in FP32 on the
CPU or a small GPU, in BF16 where the GPU has it. The text goes to standard output, everything else to standard error.
"""
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch

import config
from config import UserError
from model import autocast, choose_branch, find_checkpoint, load_checkpoint, pick_device
from tokenizer import TextStream, encode, fill_in_ids, load_tokenizer, token_bytes

# settings
out_dir = "out/cipher"               # the run; where it has no checkpoint, the newest run below out/
checkpoint: str | None = None        # a file or a run's folder; None = the run's best, else its newest
data_dir = "data/cipher"             # where a tokenizer.json is sought if none lies beside the checkpoint
device = "auto"
dtype = "auto"
prompt = "def"                       # "" begins a new document; a blank at the end would be a token of its own
suffix: str | None = None            # text behind the gap; None = the text goes on after the prompt
num_samples = 1                      # texts, made side by side
max_new_tokens = 200                 # at most; the context (seq_len) may end first
temperature = 0.8                    # 0 = always the likeliest token
sample_top_k: int | None = 50        # draw from so many likeliest tokens; None or 0 = all
sample_top_p: float | None = 0.95    # and from the fewest that reach this probability; None = all
repetition_penalty = 1.0             # above 1: what was said becomes less likely
stop: str | list = ""                # a text, or a list of them, before which the text ends; "" = none
seed = 1337
chat = False                         # True: read prompts line by line; the text goes on, trimmed to the context
serve: int | None = None             # a port; None = no server
serve_host = "127.0.0.1"             # this machine alone; another address needs a key
serve_key = ""                       # "" = none; else clients send "Authorization: Bearer KEY"


def check_settings() -> None:
    stops = [stop] if isinstance(stop, str) else stop
    rules = [(max_new_tokens >= 1, f"max_new_tokens={max_new_tokens} must be 1 or more"),
             (1 <= num_samples <= 1000, f"num_samples={num_samples} must be from 1 to 1000"),
             (temperature >= 0, f"temperature={temperature} must not be negative (0 = the likeliest token)"),
             (sample_top_k is None or sample_top_k >= 0, f"sample_top_k={sample_top_k} must not be negative (0 or None = all)"),
             (sample_top_p is None or 0 < sample_top_p <= 1, f"sample_top_p={sample_top_p} must be above 0 and at most 1 (None = all)"),
             (repetition_penalty > 0, f"repetition_penalty={repetition_penalty} must be above 0 (1 = none)"),
             (all(isinstance(word, str) for word in stops), f"stop={stop} must be a text or a list of texts"),
             (serve is None or 0 <= serve < 1 << 16, f"serve={serve} must be a port, 0 to 65535 (0 = any free one)"),
             (not (chat and num_samples > 1), f"chat=True goes on with one text, not num_samples={num_samples}"),
             (0 <= seed < 1 << 63, f"seed={seed} must be from 0 to 2^63 - 1")]
    if mistakes := [text for good, text in rules if not good]:
        raise UserError("\n".join(mistakes))


def find_tokenizer(file: Path, settings: dict) -> Path:
    """The tokenizer.json beside a checkpoint, else in the data folder it was trained from, else in data_dir."""
    places = [file.parent, Path(settings["data_dir"]), Path(data_dir)]
    return next((p / "tokenizer.json" for p in places if (p / "tokenizer.json").is_file()), file.parent / "tokenizer.json")


def trained_to_fill(settings: dict) -> bool:
    """Tell whether filling in the middle was in the training text; True where the manifest is not here to say."""
    try:
        sources = json.loads((Path(settings["data_dir"]) / "manifest.json").read_text(encoding="utf-8"))["sources"].values()
        return any(source["fim_documents"] for source in sources)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def say(text: str) -> None:
    print(text, end="", flush=True)


def complete(model, tok, context, ids: list[int], number: int) -> list[str]:
    """Go on behind ids with number texts, a single one shown as it comes; return them. The figures go to standard error."""
    stop_id, bytes_of, started, n = tok.token_to_id("</s>"), token_bytes(tok), time.perf_counter(), 0
    streams = [TextStream(bytes_of, stop) for _ in range(number)]
    texts, room = [""] * number, model.config.seq_len - len(ids)
    reasons = [f"max_new_tokens={max_new_tokens} reached" if max_new_tokens <= room else f"the context of {model.config.seq_len} tokens is full"] * number
    going = set(range(number))
    first = None
    try:
        with context:
            for new, _ in model.stream(torch.tensor([ids] * number, device=model.rope.device), max_new_tokens, temperature, sample_top_k, sample_top_p,
                                       seed, stop_id, repetition_penalty):
                first = first or time.perf_counter()
                for row in sorted(going):
                    token = new[row].item()
                    piece = "" if token == stop_id else streams[row].push(token)
                    n += token != stop_id
                    if token == stop_id or streams[row].stopped:
                        reasons[row] = "the model ended the document" if token == stop_id else "stop text reached"
                        going.remove(row)
                    texts[row] += piece
                    if number == 1:
                        say(piece)
                if not going:
                    break
    except KeyboardInterrupt:
        if not chat:
            raise
        reasons = ["interrupted"]
    for row, stream in enumerate(streams):
        texts[row] += (last := stream.close())
        if number == 1:
            say(last + (suffix or "") * (not chat) + "\n")
    seconds = time.perf_counter() - started
    print(f"{n} tokens in {seconds:.1f} s, {n / seconds:.1f} tokens/s, the first after {(first or started) - started:.2f} s; {'; '.join(sorted(set(reasons)))}", file=sys.stderr)
    return texts


def converse(model, tok, context) -> None:
    """Read a line, go on behind all that was said, and again. What no longer fits into the context is forgotten from the front."""
    print("a line to go on from; an empty one lets the text run on, /new forgets it, Ctrl-C stops a text, Ctrl-D ends", file=sys.stderr)
    begin, said, room = tok.token_to_id("<s>"), "", model.config.seq_len - 1 - min(max_new_tokens, model.config.seq_len // 2)
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            print(file=sys.stderr)
            return
        if line.strip() == "/new":
            said = ""
            continue
        said += line if line.strip() else ""
        said += complete(model, tok, context, [begin, *encode(tok, said)[-room:]], 1)[0]
        said += "\n" * (not said.endswith("\n"))


def main():
    with redirect_stdout(sys.stderr):
        config.override(globals())
        check_settings()
        place, number, told = pick_device(device, dtype)
        file = find_checkpoint(checkpoint, out_dir)
        model, settings = load_checkpoint(file, place)
        choose_branch(model, place, number)
        tok = load_tokenizer(find_tokenizer(file, settings), settings["tokenizer_sha256"])
        print(f"{file}: step {settings['step']}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; {told}")

    if broken := [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor).all()]:
        raise UserError(f"{file}: {broken[0]} is not finite, the run that made it broke down - take an earlier checkpoint")
    if suffix is not None and not trained_to_fill(settings):
        print("warning: no document was re-ordered for filling in the middle (fim_share in prepare.py): what stands between will not fit", file=sys.stderr)
    context = autocast(place, number)
    if serve is not None:
        import server
        return server.run(model, tok, context, f"{file.parent.name}/{file.stem}", serve_host, serve, serve_key)
    if chat:
        return converse(model, tok, context)
    ids = encode(tok, prompt)
    ids = [tok.token_to_id("<s>"), *(ids if suffix is None else fill_in_ids(tok, ids, suffix))]
    if len(ids) >= model.config.seq_len:
        raise UserError(f"prompt{'' if suffix is None else ' and suffix'}: {len(ids)} tokens with <s>, and the context is "
                        f"{model.config.seq_len} (seq_len) - shorten it to {model.config.seq_len - 1} or fewer")
    if num_samples == 1:
        say(prompt)
    texts = complete(model, tok, context, ids, num_samples)
    for i, text in enumerate(texts if num_samples > 1 else [], 1):
        print(f"--- {i} of {num_samples}\n{prompt}{text}{suffix or ''}", flush=True)


if __name__ == "__main__":
    config.run(main)
