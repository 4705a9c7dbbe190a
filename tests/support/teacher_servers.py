"""Servers in the place of a teacher's, and configurations with a teacher."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import crc32

import msgspec
import numpy as np

from april import config as configuration
from april.config import Config


@contextmanager
def serving(answer):
    """Address of a server that answers each request with `answer(path, body)`, or with status 400 for None."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            found = answer(self.path, body)
            data = msgspec.json.encode(found)
            self.send_response(400 if found is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class RandomTeacher:
    """Answers as SGLang does, with distributions at random that a text's tokens so far decide. The first text without
    texts of tokens, which no check before a run asks for, gets a lie."""

    def __init__(self, ids):
        self.ids, self.lies = ids, 0

    def distribution(self, text):
        return np.random.default_rng(crc32(bytes(text))).dirichlet(np.ones(self.ids))

    def top(self, text, k):
        """Pairs [k, 2] of the most likely next ids after a text."""
        p = self.distribution(text)
        order = np.argsort(-p)[:k]
        return np.stack([order, np.log(p[order])], -1)

    def __call__(self, path, body):
        text, k = body["input_ids"], body["top_logprobs_num"]
        tokens, tops = [[None, text[0], None]], [None]
        for place in range(1, len(text)):
            tokens.append([np.log(self.distribution(text[:place])[text[place]]).item(), text[place], None])
            tops.append([[p, int(number), None] for number, p in self.top(text[:place], k).tolist()])
        if not body["return_text_in_logprobs"] and not self.lies:
            self.lies, tops[-1] = 1, [tops[-1][0]] * k
        return {"meta_info": {"input_token_logprobs": tokens, "input_top_logprobs": tops}}


def with_teacher(config_file, **keys):
    tree = configuration.load(config_file, ["--reward.where", "scorer", "--reward.processes", "1"]).written()
    return Config.model_validate(tree | {"teacher": {"big": keys}})
