"""Servers that the scripts of this folder ask in turn. THUNDER: the program (target/release/thunder)."""
import concurrent.futures, json, os, pathlib, socket, subprocess, sys, time, urllib.request

PROGRAM = os.environ.get("THUNDER", str(pathlib.Path(__file__).resolve().parent.parent / "target/release/thunder"))


def split_options():
    """The words of the command line before `--`, and those behind it."""
    words = sys.argv[1:]
    return (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A `thunder serve` of this machine, which ends with `end`."""

    def __init__(self, model, options, log):
        self.port = free_port()
        command = [PROGRAM, "serve", model, "--port", str(self.port), "--no-store", *options]
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"{' '.join(command)} ended: {open(log.name).read()[-600:]}")
                time.sleep(0.2)
        sys.exit(f"{' '.join(command)} did not start within 120 s")

    def ask(self, prompt, tokens, **fields):
        """The answer, of exactly this many tokens, and when its first and its last piece came."""
        body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | fields
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        text, first, last, count = "", None, None, None
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                count = (event.get("usage") or {}).get("completion_tokens", count)
                if event["choices"] and event["choices"][0]["text"]:
                    last = time.monotonic()
                    first, text = first or last, text + event["choices"][0]["text"]
        if count != tokens:
            sys.exit(f"{tokens} tokens were asked for, {count} came: {text[-200:]!r}")
        return text, first, last

    def rate(self, prompts, tokens, **fields):
        """Answers to all prompts at once, and tokens per second from the first token to the last."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self.ask(prompt, tokens, **fields), prompts))
        seconds = max(last for _, _, last in answers) - min(first for _, first, _ in answers)
        return [text for text, _, _ in answers], len(prompts) * (tokens - 1) / seconds

    def guesses(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("vllm:spec_decode_num_")]
        return {name.partition("{")[0]: float(value) for name, value in lines}

    def end(self):
        self.process.terminate()
        self.process.wait()
