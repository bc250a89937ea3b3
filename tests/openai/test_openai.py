"""The HTTP API as the official `openai` package sees it.

Needs a running server (`thunder serve --model PATH --ranks 2 --port 8000`) and the package:

    pip install -r tests/openai/requirements.txt
    THUNDER_BASE_URL=http://127.0.0.1:8000 python tests/openai/test_openai.py -v

THUNDER_API_KEY is sent if it is set. Nothing here depends on the model's answers, only on their being repeatable.
"""

import concurrent.futures
import json
import os
import time
import unittest
import urllib.error
import urllib.request

import openai

ROOT = os.environ.get("THUNDER_BASE_URL", "http://127.0.0.1:8000").rstrip("/").removesuffix("/v1")
KEY = os.environ.get("THUNDER_API_KEY", "none")
QUESTION = [{"role": "user", "content": "What is tensor parallelism?"}]

client = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id


def chat(**fields):
    fields = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40} | fields
    return client.chat.completions.create(**fields)


def complete(**fields):
    fields = {"model": MODEL, "prompt": "Tensor parallelism is", "temperature": 0, "max_tokens": 24} | fields
    return client.completions.create(**fields)


def answer(**fields):
    return chat(**fields).choices[0].message.content


def health():
    with urllib.request.urlopen(ROOT + "/health", timeout=10) as reply:
        return json.load(reply)


def raw(method, path, body=None, content_type="application/json"):
    """A request that the package would not send: (status, OpenAI's error object)."""
    headers = {"Content-Type": content_type, "Authorization": "Bearer " + KEY}
    request = urllib.request.Request(ROOT + path, method=method, data=body, headers=headers)
    try:
        urllib.request.urlopen(request, timeout=10)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]
    raise AssertionError(f"{method} {path} was accepted")


class Predictions(unittest.TestCase):
    def test_a_prediction_changes_no_answer(self):
        text = answer()
        reply = chat(prediction={"type": "content", "content": text})
        self.assertEqual(reply.choices[0].message.content, text)
        details = reply.usage.completion_tokens_details
        self.assertGreater(details.accepted_prediction_tokens, 10)
        wrong = chat(prediction={"type": "content", "content": "Cats sleep. " * 20})
        self.assertEqual(wrong.choices[0].message.content, text)
        self.assertGreater(wrong.usage.completion_tokens_details.rejected_prediction_tokens, 20)

    def test_a_malformed_one_is_refused(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            chat(extra_body={"prediction": {"foo": [1]}})
        self.assertEqual(caught.exception.param, "prediction.type")


class Models(unittest.TestCase):
    def test_list_and_retrieve(self):
        models = client.models.list()
        self.assertEqual(models.object, "list")
        self.assertEqual([model.object for model in models.data], ["model"])
        self.assertEqual(client.models.retrieve(MODEL).id, MODEL)
        with self.assertRaises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-9")
        self.assertEqual(caught.exception.code, "model_not_found")

    def test_health(self):
        state = health()
        self.assertEqual((state["status"], state["model"]), ("ok", MODEL))
        self.assertGreaterEqual(state["ranks"], 1)


class Chat(unittest.TestCase):
    def test_answer(self):
        reply = chat()
        self.assertTrue(reply.id.startswith("chatcmpl-"))
        self.assertEqual((reply.object, reply.model), ("chat.completion", MODEL))
        self.assertLess(abs(reply.created - time.time()), 600)
        self.assertTrue(reply.system_fingerprint)
        choice = reply.choices[0]
        self.assertEqual((choice.index, choice.message.role), (0, "assistant"))
        self.assertTrue(choice.message.content)
        self.assertIn(choice.finish_reason, ("stop", "length"))
        usage = reply.usage
        self.assertGreater(usage.prompt_tokens, 0)
        self.assertTrue(0 < usage.completion_tokens <= 40)
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)

    def test_greedy_answers_are_the_same_again(self):
        self.assertEqual(answer(), answer())

    def test_stream_is_the_whole_answer(self):
        whole = chat()
        chunks = list(chat(stream=True, stream_options={"include_usage": True}))
        *pieces, last = chunks
        self.assertEqual({chunk.object for chunk in chunks}, {"chat.completion.chunk"})
        self.assertEqual(len({chunk.id for chunk in chunks}), 1)
        self.assertEqual(pieces[0].choices[0].delta.role, "assistant")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        self.assertEqual(text, whole.choices[0].message.content)
        reasons = [chunk.choices[0].finish_reason for chunk in pieces]
        self.assertEqual(reasons, [None] * (len(pieces) - 1) + [whole.choices[0].finish_reason])
        self.assertEqual(last.choices, [])
        self.assertEqual(last.usage, whole.usage)

    def test_stream_without_usage(self):
        self.assertTrue(all(chunk.usage is None for chunk in chat(stream=True)))

    def test_max_tokens_ends_with_length(self):
        for name in ("max_tokens", "max_completion_tokens"):
            fields = {"max_tokens": openai.omit, name: 3}
            reply = chat(extra_body={"ignore_eos": True}, **fields)
            self.assertEqual((reply.choices[0].finish_reason, reply.usage.completion_tokens), ("length", 3))

    def test_stop_text_never_shows(self):
        whole = answer()
        middle = len(whole) // 2
        stop = whole[middle : middle + 3]
        expected = whole[: whole.index(stop)]
        for given in (stop, ["\x00never", stop]):
            reply = chat(stop=given)
            self.assertEqual((reply.choices[0].message.content, reply.choices[0].finish_reason), (expected, "stop"))
            stream = chat(stop=given, stream=True)
            self.assertEqual("".join(chunk.choices[0].delta.content or "" for chunk in stream), expected)

    def test_seed_repeats_a_drawn_answer(self):
        # A senseless prompt and a high temperature: even a confident model has to sample here.
        fields = {"prompt": [5, 6, 7], "temperature": 2, "extra_body": {"ignore_eos": True}}
        drawn = [complete(seed=seed, **fields).choices[0].text for seed in (1, 1, 2, 3, 4)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertGreater(len(set(drawn)), 1)

    def test_n_answers(self):
        reply = chat(n=3, temperature=1.5, seed=10)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1, 2])
        alone = [chat(temperature=1.5, seed=10 + index) for index in range(3)]
        texts = [choice.message.content for choice in reply.choices]
        self.assertEqual(texts, [one.choices[0].message.content for one in alone])
        self.assertEqual(reply.usage.prompt_tokens, alone[0].usage.prompt_tokens)
        self.assertEqual(reply.usage.completion_tokens, sum(one.usage.completion_tokens for one in alone))
        streamed = ["", "", ""]
        for chunk in chat(n=3, temperature=1.5, seed=10, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        self.assertEqual(streamed, texts)

    def test_logprobs(self):
        choice = chat(logprobs=True, top_logprobs=3).choices[0]
        tokens = choice.logprobs.content
        spelled = b"".join(bytes(token.bytes or []) for token in tokens)
        self.assertEqual(spelled.decode(errors="replace"), choice.message.content)
        for token in tokens:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            alternatives = [top.logprob for top in token.top_logprobs]
            self.assertEqual(alternatives, sorted(alternatives, reverse=True))
            # Greedy answers consist of the most likely tokens.
            self.assertAlmostEqual(token.logprob, alternatives[0], places=4)
        streamed = []
        for chunk in chat(logprobs=True, top_logprobs=3, stream=True):
            if chunk.choices[0].logprobs:
                streamed += chunk.choices[0].logprobs.content
        self.assertEqual([token.token for token in streamed], [token.token for token in tokens])

    def test_messages_of_every_form(self):
        messages = [
            {"role": "developer", "content": "Answer briefly."},
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "RDMA?"}]},
            {"role": "assistant", "content": "Remote direct memory access."},
            {"role": "user", "content": "And TCP?"},
        ]
        parted = answer(messages=messages)
        messages[0]["role"] = "system"
        messages[1]["content"] = "What is RDMA?"
        self.assertEqual(parted, answer(messages=messages))

    def test_sampling_fields_are_taken(self):
        fields = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
        reply = chat(
            temperature=0.8, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"5": -100}, seed=1,
            user="somebody", metadata={"purpose": "test"}, extra_body=fields,
        )
        self.assertGreater(reply.usage.completion_tokens, 0)


class Completions(unittest.TestCase):
    def test_prompts_of_every_form(self):
        one = complete()
        self.assertTrue(one.id.startswith("cmpl-"))
        self.assertEqual(one.object, "text_completion")
        two = complete(prompt=["Tensor parallelism is", "RDMA is"])
        self.assertEqual([choice.index for choice in two.choices], [0, 1])
        self.assertEqual(two.choices[0].text, one.choices[0].text)
        ids = complete(prompt=[5, 6, 7])
        self.assertEqual(ids.usage.prompt_tokens, 3)
        lists = complete(prompt=[[5, 6, 7], [8, 9]])
        self.assertEqual(lists.choices[0].text, ids.choices[0].text)
        self.assertEqual(lists.usage.prompt_tokens, 5)

    def test_stream_is_the_whole_answer(self):
        whole = complete().choices[0]
        chunks = list(complete(stream=True))
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks), whole.text)
        self.assertEqual(chunks[-1].choices[0].finish_reason, whole.finish_reason)

    def test_length_defaults_to_16_tokens(self):
        reply = complete(max_tokens=openai.omit, extra_body={"ignore_eos": True})
        self.assertEqual(reply.usage.completion_tokens, 16)

    def test_logprobs(self):
        choice = complete(logprobs=2, extra_body={"ignore_eos": True}).choices[0]
        lists = choice.logprobs
        count = len(lists.tokens)
        self.assertGreater(count, 0)
        self.assertEqual([len(lists.token_logprobs), len(lists.top_logprobs), len(lists.text_offset)], [count] * 3)
        self.assertEqual(lists.text_offset[0], 0)
        self.assertEqual(lists.text_offset, sorted(lists.text_offset))
        for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs):
            self.assertEqual(top[token], logprob)


class Errors(unittest.TestCase):
    def refused(self, make, param, code=None, **fields):
        with self.assertRaises(openai.BadRequestError) as caught:
            make(**fields)
        error = caught.exception
        self.assertEqual((error.status_code, error.type, error.param), (400, "invalid_request_error", param))
        if code:
            self.assertEqual(error.code, code)

    def test_fields_at_fault_are_named(self):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
        for stream in (False, True):
            self.refused(chat, "tools[0].type", tools=[tool | {"type": "telepathy"}], stream=stream)
            self.refused(chat, "response_format.type", response_format={"type": "xml"}, stream=stream)
            self.refused(chat, "colour", "unknown_parameter", extra_body={"colour": 1}, stream=stream)
            self.refused(chat, "temperature", temperature=3, stream=stream)
            self.refused(chat, "top_logprobs", top_logprobs=2, stream=stream)
            self.refused(complete, "echo", echo=True, stream=stream)
            self.refused(complete, "suffix", suffix="x", stream=stream)
        self.refused(chat, "messages[0].content[0].type", messages=[{"role": "user", "content": image}])
        self.refused(chat, "messages[0].tool_call_id", messages=[{"role": "tool", "content": "x"}])
        self.refused(chat, "messages", messages=[])
        self.refused(chat, "n", n=0)
        self.refused(complete, "best_of", best_of=3)

    def test_fields_that_change_nothing_are_accepted(self):
        plain = chat(temperature=0, max_tokens=8)
        extras = {"parallel_tool_calls": True, "keep_alive": "5m", "cache_prompt": True}
        same = chat(temperature=0, max_tokens=8, tools=[], reasoning_effort="low", extra_body=extras)
        self.assertEqual(same.choices[0].message.content, plain.choices[0].message.content)

    def test_context_overflow(self):
        # At least one token for each word.
        long = " ".join(f"w{index}" for index in range(client.models.retrieve(MODEL).context_length))
        self.refused(complete, "prompt", "context_length_exceeded", prompt=long)
        message = [{"role": "user", "content": long}]
        self.refused(chat, "messages", "context_length_exceeded", messages=message)

    def test_unknown_model(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            chat(model="gpt-9")
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))
        self.assertIn(MODEL, str(caught.exception))

    def test_requests_that_the_package_would_not_send(self):
        path = "/v1/chat/completions"
        status, error = raw("POST", path, b'{"model": ')
        self.assertEqual((status, error["type"]), (400, "invalid_request_error"))
        self.assertIn("line 1 column", error["message"])
        self.assertEqual(raw("POST", path, b"[]")[0], 400)
        self.assertEqual(raw("POST", path, b"{}", "text/plain")[0], 415)
        self.assertEqual(raw("GET", path)[0], 405)
        self.assertEqual(raw("GET", "/v1/nothing")[0], 404)


class Load(unittest.TestCase):
    def settles(self, limit_s):
        """True if nothing runs or waits any more within the limit."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            state = health()
            if state["running"] == state["waiting"] == 0:
                return True
            time.sleep(0.02)
        return False

    def test_a_client_that_goes_away_frees_its_slots(self):
        self.assertTrue(self.settles(30))
        fields = {"max_tokens": openai.omit, "extra_body": {"ignore_eos": True}}
        stream = chat(stream=True, n=4, **fields)
        next(iter(stream))
        self.assertGreater(health()["running"], 0)
        stream.close()
        self.assertTrue(self.settles(5), health())
        self.assertTrue(answer())

    def test_eight_at_once_say_what_each_says_alone(self):
        questions = [f"Say something about topic {index}." for index in range(8)]
        ask = lambda text: answer(messages=[{"role": "user", "content": text}], temperature=0.8, seed=3)
        alone = [ask(text) for text in questions]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            self.assertEqual(list(pool.map(ask, questions)), alone)


class Embeddings(unittest.TestCase):
    def test_texts_and_their_tokens_have_the_same_embedding(self):
        text = "Ranks add their partial sums."
        request = urllib.request.Request(ROOT + "/tokenize", json.dumps({"prompt": text}).encode(),
                                         {"Content-Type": "application/json", "Authorization": "Bearer " + KEY})
        ids = json.load(urllib.request.urlopen(request))["tokens"]
        # The client asks for base64 unless told otherwise.
        coded = client.embeddings.create(model=MODEL, input=[text, "Something else."])
        plain = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
        self.assertEqual(coded.usage.total_tokens, coded.usage.prompt_tokens)
        self.assertAlmostEqual(sum(x * x for x in coded.data[0].embedding), 1, places=5)
        same = sum(a * b for a, b in zip(coded.data[0].embedding, plain.data[0].embedding))
        other = sum(a * b for a, b in zip(coded.data[1].embedding, plain.data[0].embedding))
        self.assertGreater(same, 0.999)
        self.assertLess(other, same)

    def test_dimensions(self):
        embedding = client.embeddings.create(model=MODEL, input="A rank.", dimensions=16).data[0].embedding
        self.assertEqual(len(embedding), 16)
        self.assertAlmostEqual(sum(x * x for x in embedding), 1, places=5)
        with self.assertRaises(openai.BadRequestError):
            client.embeddings.create(model=MODEL, input="A rank.", dimensions=1 << 20)

    def test_rerank(self):
        body = {"model": MODEL, "query": "What adds partial sums?", "documents": ["An all-reduce.", "A cat."]}
        request = urllib.request.Request(ROOT + "/v1/rerank", json.dumps(body).encode(),
                                         {"Content-Type": "application/json", "Authorization": "Bearer " + KEY})
        results = json.load(urllib.request.urlopen(request))["results"]
        self.assertEqual(sorted(result["index"] for result in results), [0, 1])
        scores = [result["relevance_score"] for result in results]
        self.assertTrue(1 >= scores[0] >= scores[1] >= 0, scores)


if __name__ == "__main__":
    unittest.main()
