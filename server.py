"""Answer the OpenAI completions API for one checkpoint; `python sample.py --serve=8000` starts it.

    GET  /                a page to type a prompt and see which population spoke for each token
    GET  /health          {"status": "ok"}
    GET  /v1/models       the one model
    POST /v1/completions  prompt (text, ids, or lists of them), max_tokens, temperature, top_p, n, stream, stop, seed, echo, logprobs, suffix;
                          beside OpenAI's: top_k, repetition_penalty, gate_mass (Sheldon's share of the gates behind each token, by choice)
    GET  /tokenizer_info, POST /tokenize, /detokenize     as vLLM has them; the lm-evaluation-harness reads its token ids from there

Every step of every request runs in one thread, in turn, so that requests share the machine fairly and never each other's state.
Requests get the text alone: nothing they send is executed, opened or looked up.
"""
import hmac
import json
import select
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from config import UserError
from model import Watch
from tokenizer import TextStream, encode, fill_in_ids, token_bytes

BODY_BYTES = 4 << 20                # of a request
ROWS = 128                          # texts of one request, prompts times n
REQUESTS = 32                       # at work at a time
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Refusal(Exception):
    """A request that gets an error: (HTTP status, what is wrong, the parameter it is about)."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


# ----------------------------------------------------------------------------------------------------------
# What a request asks for
# ----------------------------------------------------------------------------------------------------------

def number(low, high, whole=False):
    """A check of a number in [low, high]; None and what is not there become the default."""
    kinds = (int,) if whole else (int, float)
    return lambda value: type(value) in kinds and low <= value <= high, f"{'a whole number' if whole else 'a number'} from {low:,} to {high:,}"


YES_NO = (lambda value: type(value) is bool, "true or false")
TEXT = (lambda value: isinstance(value, str), "a text")
NOTHING = (lambda value: not value, "left out: it is not supported here")
FIELDS = {                          # name: (default, check, what it must be)
    "model": ("", *TEXT), "user": ("", *TEXT), "prompt": ("", lambda value: isinstance(value, (str, list)), "a text, ids, or a list of either"),
    "suffix": (None, *TEXT), "max_tokens": (16, *number(0, 1 << 20, whole=True)), "temperature": (1.0, *number(0, 100)), "top_p": (1.0, *number(1e-9, 1)),
    "top_k": (0, *number(0, 1 << 20, whole=True)), "repetition_penalty": (1.0, *number(0.01, 100)), "n": (1, *number(1, ROWS, whole=True)),
    "best_of": (None, *number(1, ROWS, whole=True)), "stream": (False, *YES_NO), "stream_options": (None, lambda value: isinstance(value, dict), "an object"),
    "logprobs": (None, *number(0, 20, whole=True)), "echo": (False, *YES_NO), "seed": (None, *number(-(1 << 63), (1 << 63) - 1, whole=True)),
    "stop": ((), lambda value: isinstance(value, str) or isinstance(value, list) and len(value) <= 16 and all(isinstance(word, str) for word in value),
             "a text or a list of up to 16"), "gate_mass": (False, *YES_NO), "presence_penalty": (0, *NOTHING), "frequency_penalty": (0, *NOTHING), "logit_bias": (None, *NOTHING)}


def read_object(body: bytes) -> dict:
    def refuse(word):
        raise ValueError(f"{word} is no JSON number")
    try:
        request = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict):
        raise Refusal(400, "the body must be a JSON object")
    return request


def read_request(body: bytes) -> dict:
    """Return the fields of a completion request, all checked."""
    given = read_object(body)
    if unknown := sorted(set(given) - set(FIELDS)):
        raise Refusal(400, f"unknown parameter: {unknown[0][:50]}", unknown[0][:50])
    request = {}
    for name, (default, good, what) in FIELDS.items():
        value = given.get(name)
        if value is not None and not good(value):
            raise Refusal(400, f"{name}: must be {what}", name)
        request[name] = default if value is None else value
    if request["best_of"] not in (None, request["n"]):
        raise Refusal(400, "best_of: must be n, no more are made than given", "best_of")
    if request["suffix"] is not None and request["echo"]:
        raise Refusal(400, "echo: goes with a prompt alone, not with a suffix", "echo")
    return request


# ----------------------------------------------------------------------------------------------------------
# The model's side
# ----------------------------------------------------------------------------------------------------------

class Engine:
    """The model and the one thread it runs in."""

    def __init__(self, model, tok, context, name: str):
        self.model, self.tok, self.context, self.name = model, tok, context, name
        self.bytes_of, self.created = token_bytes(tok), int(time.time())
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.begin, self.end = tok.token_to_id("<s>"), tok.token_to_id("</s>")

    def do(self, work, *arguments):
        """Run a piece of work in the model's thread and wait for it."""
        def inside():
            with torch.inference_mode(), self.context:
                return work(*arguments)
        return self.thread.submit(inside).result()

    def spell(self, token: int) -> str:
        """A token as text: a control token by its name, bytes that are no text by themselves in OpenAI's way."""
        try:
            return self.bytes_of[token].decode("utf-8") or self.tok.id_to_token(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of[token])

    def read_prompts(self, request: dict) -> list[tuple[list[int], int]]:
        """Return for every prompt its ids, <s> in front, and how many of these the client did not give."""
        given, V, seq_len = request["prompt"], self.model.config.vocab_size, self.model.config.seq_len
        if isinstance(given, str) or given and all(type(i) is int for i in given):
            given = [given]
        if not given:
            raise Refusal(400, "prompt: the list is empty", "prompt")
        if len(given) * request["n"] > ROWS:
            raise Refusal(400, f"n: {len(given)} prompts times {request['n']} are more than {ROWS} texts", "n")
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                ids = encode(self.tok, prompt)
            elif isinstance(prompt, list) and all(type(i) is int for i in prompt):
                if not all(0 <= i < V for i in prompt):
                    raise Refusal(400, f"prompt: ids must be from 0 to {V - 1}", "prompt")
                ids = prompt
            else:
                raise Refusal(400, f"prompt: must be {FIELDS['prompt'][2]}", "prompt")
            if request["suffix"] is not None:
                ids = fill_in_ids(self.tok, ids[ids[:1] == [self.begin]:], request["suffix"])
            prompts.append((ids, 0) if ids[:1] == [self.begin] else ([self.begin, *ids], 1))
            if (n := len(prompts[-1][0])) + (request["max_tokens"] > 0) > seq_len:
                raise Refusal(400, f"prompt: {n} tokens with <s>{' and one to come' if request['max_tokens'] else ''} are more than the context of {seq_len} - shorten it", "prompt")
        return prompts

    def describe(self, log_p, tokens, top: int):
        """log_p [T, V], tokens [T] -> for each a (log probability, {spelling: log probability of the top likeliest and it})."""
        own, best = log_p.gather(1, tokens[:, None])[:, 0].tolist(), log_p.topk(min(max(1, top), log_p.size(1)))
        return [(p, dict(zip(map(self.spell, ids[:top]), values[:top])) | {self.spell(token): p})
                for p, token, ids, values in zip(own, tokens.tolist(), best.indices.tolist(), best.values.tolist())]

    def judge(self, ids: list[int], top: int, gates: bool) -> tuple[list, list]:
        """Of every id but the first its description, and Sheldon's share of the gates behind it."""
        idx = torch.tensor([ids], device=self.model.rope.device)
        with Watch(self.model) if gates else nullcontext() as watch:
            logits = self.model(idx, all_logits=True)["logits"][0, :-1]
        found = [told for part, tokens in zip(logits.split(256), idx[0, 1:].split(256)) for told in self.describe(part.log_softmax(-1), tokens, top)]
        return found, self.mass(watch, 1)[0][:-1] if watch and watch.routes else [None] * len(found)

    @staticmethod
    def mass(watch, rows: int) -> list[list[float]]:
        """Sheldon's share of the gates, mean over layers, per row and position."""
        return torch.stack([gate[:, 0].sum(-1).float() for _, gate in watch.routes]).mean(0).view(rows, -1).tolist()

    def step(self, stream, rows: int, request: dict):
        """The next (ids, their descriptions or None, Sheldon's share or None) of all rows; None at the end."""
        with Watch(self.model) if request["gate_mass"] else nullcontext() as watch:
            new, logits = next(stream, (None, None))
        if new is None:
            return None
        told = self.describe(logits.log_softmax(-1), new, request["logprobs"]) if request["logprobs"] is not None else [None] * rows
        masses = [row[-1] for row in self.mass(watch, rows)] if watch and watch.routes else [None] * rows
        return new.tolist(), told, masses

    def complete(self, request: dict, prompts: list[tuple[list[int], int]], gone) -> Iterator[tuple[int, str, list, str | None]]:
        """Yield (row, text, [(id, description, Sheldon's share)], finish reason or None) as they come. gone(): has the client left?"""
        n = request["n"]
        for number, (ids, ours) in enumerate(prompts):
            first, streams, going, pending = number * n, [TextStream(self.bytes_of, request["stop"]) for _ in range(n)], set(range(n)), [[] for _ in range(n)]
            if request["echo"]:
                found = [((None, None), None)] * len(ids)               # of <s>, and of all where nothing is asked
                if len(ids) > 1 and (request["logprobs"] is not None or request["gate_mass"]):
                    found[1:] = zip(*self.do(self.judge, ids, request["logprobs"] or 0, request["gate_mass"]))
                text = b"".join(self.bytes_of[token] for token in ids[1:]).decode("utf-8", "replace")
                for row in going:
                    yield first + row, text, [(token, *told) for token, told in zip(ids[ours:], found[ours:])], None
            stream = self.model.stream(torch.tensor([ids] * n, device=self.model.rope.device), request["max_tokens"], request["temperature"], request["top_k"],
                                       request["top_p"], request["seed"] if request["seed"] is None else request["seed"] % (1 << 63), self.end, request["repetition_penalty"])
            while going and (result := self.do(self.step, stream, n, request)):
                if gone():
                    return
                for row, (token, *told) in enumerate(zip(*result)):
                    if row not in going:
                        continue
                    piece = "" if token == self.end else streams[row].push(token)
                    pending[row] += [(token, *told)] * (token != self.end)
                    done = token == self.end or streams[row].stopped
                    if done:
                        going.remove(row)
                        yield first + row, piece + streams[row].close(), pending[row], "stop"
                    elif piece:
                        yield first + row, piece, pending[row], None
                        pending[row] = []
            for row in going:
                yield first + row, streams[row].close(), pending[row], "length"


# ----------------------------------------------------------------------------------------------------------
# The answer's form
# ----------------------------------------------------------------------------------------------------------

class Choice:
    """Build the pieces of one text as OpenAI has them; offsets and the first token's missing value run on from piece to piece."""

    def __init__(self, engine: Engine, request: dict, index: int):
        self.engine, self.request, self.index, self.place = engine, request, index, 0

    def piece(self, text: str, tokens: list, reason: str | None) -> dict:
        choice = dict(index=self.index, text=text, logprobs=None, finish_reason=reason)
        spelt = [self.engine.spell(token) for token, _, _ in tokens]
        if self.request["logprobs"] is not None:
            offsets = []
            for token, _, _ in tokens:
                offsets.append(self.place)
                self.place += len(self.engine.bytes_of[token].decode("utf-8", "ignore"))
            choice["logprobs"] = dict(tokens=list(spelt), token_logprobs=[told[0] for _, told, _ in tokens], text_offset=offsets,
                                      top_logprobs=[told[1] for _, told, _ in tokens])
        if self.request["gate_mass"]:
            choice |= dict(tokens=spelt, gate_mass=[mass for _, _, mass in tokens])
        return choice


def joined(pieces: list[dict]) -> dict:
    """Put the pieces of one choice together."""
    whole = pieces[0]
    for piece in pieces[1:]:
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"] or whole["finish_reason"]
        for name, values in (piece["logprobs"] or {}).items():
            whole["logprobs"][name] += values
        for name in ("tokens", "gate_mass"):
            if name in piece:
                whole[name] += piece[name]
    return whole


# ----------------------------------------------------------------------------------------------------------
# HTTP
# ----------------------------------------------------------------------------------------------------------

class Handler(BaseHTTPRequestHandler):
    protocol_version, server_version, sys_version = "HTTP/1.1", "cipher", ""
    timeout = 60                    # seconds that a client may keep a connection idle or leave an answer unread

    def log_message(self, form, *arguments):
        print(f"{self.client_address[0]} {form % arguments}".translate({i: "?" for i in range(32)}), file=sys.stderr, flush=True)

    def log_request(self, code="-", size="-"):
        if self.path != "/health":
            self.log_message("%s %s %s", self.command, self.path[:100], code)

    def send(self, status: int, body: bytes | dict, kind="application/json", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8")
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", len(body)), ("X-Content-Type-Options", "nosniff"), *headers.items()):
            self.send_header(name.replace("_", "-"), str(value))
        if status >= 400 and self.command == "POST":
            self.close_connection = True            # what it still sends is not read
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code, message=None, explain=None):
        """Errors of the HTTP layer itself in the form of all others."""
        self.command = getattr(self, "command", None) or "?"
        self.path = getattr(self, "path", "?")
        self.close_connection = True
        self.send(int(code), dict(error=dict(message=message or self.responses.get(code, ("error",))[0], type="invalid_request_error", param=None, code=None)), Connection="close")

    def refuse(self, refusal: Refusal):
        kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
        self.send(refusal.status, dict(error=dict(message=str(refusal), type=kind, param=refusal.param, code=None)))

    def admit(self, page=False):
        """Refuse what a foreign web page sends through the user's browser, and who lacks the key."""
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self.server.server_name_asked in LOOPBACK and name.strip("[]") not in LOOPBACK:
            raise Refusal(403, f"this server answers for {', '.join(LOOPBACK)} alone, not for the host {host[:100]}")
        origin = self.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(403, f"no requests from pages of {origin[:100]}")
        key = self.server.key
        if key and not page and not hmac.compare_digest(self.headers.get("Authorization", "").encode("utf-8", "replace"), f"Bearer {key}".encode()):
            raise Refusal(401, "a key is needed: Authorization: Bearer KEY")

    def body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise Refusal(411, "Content-Length is missing")
        if int(length) > BODY_BYTES:
            for _ in range(min(int(length), 1 << 26) >> 16):        # a client that is still sending would not hear the answer
                self.rfile.read(1 << 16)
            raise Refusal(413, f"the body has {int(length):,} bytes, more than {BODY_BYTES:,}")
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise ConnectionError("the client left")
        return data

    def gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def answer(self, routes: dict):
        path = self.path.partition("?")[0]
        try:
            if path not in routes:
                others = "POST" if self.command in ("GET", "HEAD") else "GET"
                elsewhere = path in (POSTS if others == "POST" else GETS)
                raise Refusal(405 if elsewhere else 404, f"{path[:100]}: {f'answers {others} alone' if elsewhere else 'there is nothing here'}")
            self.admit(page=path in ("/", "/health"))
            routes[path](self)
        except Refusal as refusal:
            self.refuse(refusal)
        except (ConnectionError, TimeoutError):
            self.close_connection = True            # the client has gone; nobody is left to tell
        except Exception as error:                  # one request's trouble must not become another's
            self.log_message("%s", f"failed: {type(error).__name__}: {error}")
            self.close_connection = True
            if self.streaming:
                self.event(dict(error=dict(message=f"{type(error).__name__}", type="server_error", param=None, code=None)))
            else:
                self.refuse(Refusal(500, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"))

    def do_GET(self):
        self.streaming = False
        self.answer(GETS)

    do_HEAD = do_GET

    def do_POST(self):
        self.streaming = False
        self.answer(POSTS)

    def page(self):
        self.send(200, (Path(__file__).with_name("page.html")).read_bytes(), "text/html; charset=utf-8", Content_Security_Policy=
                  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'")

    def health(self):
        self.send(200, dict(status="ok"))

    def models(self):
        engine = self.server.engine
        self.send(200, dict(object="list", data=[dict(id=engine.name, object="model", created=engine.created, owned_by="cipher", max_model_len=engine.model.config.seq_len)]))

    def tokenizer_info(self):
        self.send(200, dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", vocab_size=self.server.engine.model.config.vocab_size))

    def tokenize(self):
        text, engine = read_object(self.body()).get("prompt"), self.server.engine
        if not isinstance(text, str):
            raise Refusal(400, "prompt: must be a text", "prompt")
        # a control token alone asks for its id; within a text it is plain characters, as in training
        ids = [engine.tok.token_to_id(text)] if text in ("<s>", "</s>", "<pad>") else encode(engine.tok, text)
        self.send(200, dict(tokens=ids, count=len(ids), max_model_len=engine.model.config.seq_len))

    def detokenize(self):
        ids, engine = read_object(self.body()).get("tokens"), self.server.engine
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < len(engine.bytes_of) for i in ids):
            raise Refusal(400, f"tokens: must be a list of ids from 0 to {len(engine.bytes_of) - 1}", "tokens")
        self.send(200, dict(prompt=b"".join(engine.bytes_of[i] for i in ids).decode("utf-8", "replace")))

    def completions(self):
        if not self.server.places.acquire(blocking=False):
            raise Refusal(503, f"{REQUESTS} requests are at work - try again in a moment")
        try:
            self.complete(read_request(self.body()))
        finally:
            self.server.places.release()

    def complete(self, request: dict):
        engine = self.server.engine
        prompts = engine.read_prompts(request)
        n_prompt = sum(len(ids) - ours for ids, ours in prompts)
        choices, pieces, n_new = {}, {}, 0
        frame = dict(id=f"cmpl-{uuid.uuid4().hex}", object="text_completion", created=int(time.time()), model=engine.name)
        usage = lambda: dict(prompt_tokens=n_prompt, completion_tokens=n_new, total_tokens=n_prompt + n_new)
        for index, text, tokens, reason in engine.complete(request, prompts, self.gone):
            piece = choices.setdefault(index, Choice(engine, request, index)).piece(text, tokens, reason)
            echoed = request["echo"] and index not in pieces
            n_new += 0 if echoed else len(tokens)
            if request["stream"]:
                pieces[index] = []
                self.event(frame | dict(choices=[piece]))
            else:
                pieces.setdefault(index, []).append(piece)
        if request["stream"]:
            if (request["stream_options"] or {}).get("include_usage"):
                self.event(frame | dict(choices=[], usage=usage()))
            self.event("[DONE]")
        elif not self.gone():
            self.send(200, frame | dict(choices=[joined(pieces[index]) for index in sorted(pieces)], usage=usage()))

    def event(self, content):
        """Send one server-sent event; the first one opens the answer."""
        if not self.streaming:
            self.streaming = self.close_connection = True
            self.send_response(200)
            for name, value in (("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-store"), ("Connection", "close")):
                self.send_header(name, value)
            self.end_headers()
        self.wfile.write(b"data: " + (content if isinstance(content, str) else json.dumps(content)).encode("utf-8") + b"\n\n")


GETS = {"/": Handler.page, "/health": Handler.health, "/v1/models": Handler.models, "/tokenizer_info": Handler.tokenizer_info}
POSTS = {"/v1/completions": Handler.completions, "/tokenize": Handler.tokenize, "/detokenize": Handler.detokenize}


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def handle_error(self, request, client_address):
        """A connection that broke off is no event; anything else is a line."""
        if not isinstance(error := sys.exc_info()[1], (ConnectionError, TimeoutError)):
            print(f"{client_address[0]} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def run(model, tok, context, name: str, host: str, port: int, key: str) -> None:
    """Serve until Ctrl-C. UserError where the address is not to be had, or would let in anyone."""
    if host not in LOOPBACK and not key:
        raise UserError(f"serve_host={host}: lets in anyone who reaches this machine - set --serve_key=SECRET too, or leave it at 127.0.0.1")
    Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"serve={port}: {host}:{port} is not to be had ({getattr(error, 'strerror', None) or error}) - another port?") from None
    server.engine, server.key, server.places, server.server_name_asked = Engine(model, tok, context, name), key, threading.BoundedSemaphore(REQUESTS), host
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
    print(f"serving {name} at {address} (a page to try it) and {address}/v1 (OpenAI completions); Ctrl-C ends", file=sys.stderr, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    finally:
        server.server_close()
