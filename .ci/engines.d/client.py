"""HTTP to a vLLM server: completions that can be given up, and metrics."""
import http.client
import json
import socket
import threading
import time

MODEL_NAME = "tiny"
ANSWER_LIMIT_S = 180


class Refused(Exception):
    """The server answered with an error."""


class Answer:
    def __init__(self, body, seconds):
        choice = body["choices"][0]
        self.tokens, self.logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        self.finish, self.transfer, self.seconds = choice["finish_reason"], body.get("kv_transfer_params"), seconds


class Completion:
    """A request under way. Greedy, with log-probabilities, and never ended by an end-of-text token."""

    def __init__(self, server, prompt, tokens, transfer=None, timeout=ANSWER_LIMIT_S):
        body = dict(model=MODEL_NAME, prompt=prompt, max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True, return_token_ids=True)
        if transfer:
            body["kv_transfer_params"] = transfer
        self.server, self.body, self.timeout = server, body, timeout
        self.answer = self.error = None
        self.given_up = False
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
        self.thread = threading.Thread(target=self.exchange, daemon=True)
        self.began = time.monotonic()
        self.thread.start()

    def exchange(self):
        try:
            self.connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
            response = self.connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise Refused(f"{self.server.name} answered {response.status}: {text[:300].decode(errors='replace')}")
            self.answer = Answer(json.loads(text), time.monotonic() - self.began)
        except (OSError, http.client.HTTPException, Refused, ValueError, KeyError, AttributeError) as error:
            self.error = error
        finally:
            self.connection.close()

    def done(self):
        return not self.thread.is_alive()

    def give_up(self):
        """Disconnects, as a client does that is tired of waiting. Returns whether an answer had not come by then."""
        pending = not self.done()
        self.given_up = True
        connected = self.connection.sock
        if connected is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.thread.join(10)
        return pending and self.answer is None

    def join(self, limit_s):
        """Waits for its end, whatever that is."""
        self.thread.join(limit_s)
        if self.thread.is_alive():
            raise Refused(f"{self.server.name} did not answer in {limit_s} s")

    def result(self):
        """The answer. Raises what went wrong."""
        self.join(self.timeout + 10)
        if self.error:
            raise self.error
        return self.answer


def complete(server, prompt, tokens, transfer=None, timeout=ANSWER_LIMIT_S):
    return Completion(server, prompt, tokens, transfer, timeout).result()


def get(port, path, timeout=10):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"{path}: {response.status}")
    return text
