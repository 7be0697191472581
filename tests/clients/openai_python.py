"""Tests the server with openai-python. The same program runs with several versions of it."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import sys
import time
import urllib.request

import openai

import harness
from harness import IMAGES, KEY, SHAPES, SIZE, SLOW, STAR, check, equal, in_background

main = busy = None


class Client(openai.OpenAI):
    """A client that keeps the status, headers and time of each answer."""

    def __init__(self, server, **options):
        self.answers = []
        sender = openai.DefaultHttpxClient(event_hooks={"response": [self.note]})
        super().__init__(**{"base_url": server.url, "api_key": "none", "http_client": sender, "timeout": 60, **options})

    def note(self, answer):
        self.answers.append((answer.status_code, answer.headers, time.monotonic()))


def client(**options):
    return Client(main, **options)


def content(data):
    return base64.b64decode(data.b64_json, validate=True)


def failure(kind, status, code, param, call, words=""):
    """Checks the exception that a call raises."""
    try:
        call()
    except openai.APIStatusError as error:
        got = (type(error), error.status_code, error.code, error.param)
        assert got == (kind, status, code, param), f"{got} instead of {(kind, status, code, param)}: {error}"
        assert error.request_id, "the error has no request id"
        assert error.type, "the error has no type"
        assert words in str(error), f"the message has no {words!r}: {error}"
        return error
    raise AssertionError(f"{code} was expected")


def test_formats():
    for output_format in ("png", "jpeg", "webp"):
        images = client().images.generate(
            prompt=STAR, model="gpt-image-1", size=SIZE, output_format=output_format, extra_body={"seed": 7}
        )
        check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7, output_format=output_format)
        equal((images.size, images.output_format, images.data[0].url), (SIZE, output_format, None))
        equal(images.data[0].seed, 7)
        assert abs(images.created - time.time()) < 60
        harness.check_usage(images.usage.to_dict())
        extra = images.model_extra["kiln"]
        equal((extra["steps"], extra["warnings"]), (4, extra["warnings"]))


def test_headers():
    raw = client().images.with_raw_response.generate(
        prompt=STAR, size=SIZE, extra_body={"seed": 7}, extra_headers={"X-Request-Id": "my-request_1"}
    )
    equal(raw.headers["x-request-id"], "my-request_1")
    equal(raw.headers["x-kiln-seed"], "7")
    assert float(raw.headers["x-kiln-ms"]) >= 0
    assert "x-kiln-ignored" not in raw.headers
    # An id is made if the client has none. The SDK knows it as `_request_id`.
    images = client().images.generate(prompt=STAR, size=SIZE, extra_body={"seed": 7})
    assert images._request_id and images._request_id != "my-request_1"


def test_url():
    images = client().images.generate(prompt=STAR, size=SIZE, response_format="url", extra_body={"seed": 7})
    url = images.data[0].url
    assert url.startswith(main.url + "/images/"), url
    equal((images.data[0].b64_json, images.data[0].seed), (None, 7))
    with urllib.request.urlopen(url) as answer:
        equal(answer.headers["content-type"], "image/png")
        check(answer.read(), prompt=STAR, size=SIZE, seed=7)
    # Programs that were made for DALL-E expect a URL without asking for one.
    old = client().images.generate(prompt=STAR, model="dall-e-3", size=SIZE, quality="standard", extra_body={"seed": 7})
    assert old.data[0].url and old.data[0].b64_json is None


def test_several_images():
    images = client().images.generate(prompt=STAR, size=SIZE, n=2, extra_body={"seed": 11})
    equal([image.seed for image in images.data], [11, 12])
    for image in images.data:
        check(content(image), prompt=STAR, size=SIZE, seed=image.seed)
    harness.check_usage(images.usage.to_dict(), images=2)


def test_size_of_the_model():
    images = client().images.generate(prompt=STAR, size="auto", extra_body={"seed": 7})
    equal(images.size, "256x256")
    check(content(images.data[0]), prompt=STAR, seed=7)


def test_random_seed():
    seeds = set()
    for _ in range(2):
        images = client().images.generate(prompt=STAR, size="64x64")
        seed = images.data[0].seed
        seeds.add(seed)
        check(content(images.data[0]), is_stored=False, prompt=STAR, size="64x64", seed=seed)
    equal(len(seeds), 2)


def test_large_seed():
    # Python's numbers have no limit.
    images = client().images.generate(prompt=STAR, size="64x64", extra_body={"seed": 2**64 - 1})
    equal(images.data[0].seed, 2**64 - 1)
    check(content(images.data[0]), prompt=STAR, size="64x64", seed=2**64 - 1)


def test_models():
    names = [model.id for model in client().models.list()]
    assert names, "there are no models"
    model = client().models.retrieve(names[0])
    equal((model.id, model.object), (names[0], "model"))
    for name in (names[0], "kiln"):
        images = client().images.generate(prompt=STAR, model=name, size=SIZE, extra_body={"seed": 7})
        check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7)
    failure(openai.NotFoundError, 404, "model_not_found", "model", lambda: client().models.retrieve("other"), names[0])


def test_edit():
    with open(IMAGES / "scene.png", "rb") as image:
        images = client().images.edit(prompt=SHAPES, image=image, extra_body={"seed": 3})
    equal((images.size, images.data[0].seed), (SIZE, 3))
    check(content(images.data[0]), prompt=SHAPES, seed=3, images=["scene.png"])
    harness.check_usage(images.usage.to_dict(), edits=True)


def test_edit_of_three_images():
    # A path, bytes, and a file with a misleading name and type.
    parts = [
        IMAGES / "scene.png",
        (IMAGES / "ring.jpg").read_bytes(),
        ('a "ü".txt', io.BytesIO((IMAGES / "stripes.webp").read_bytes()), "text/plain"),
    ]
    images = client().images.edit(prompt=SHAPES, image=parts, size="64x80", output_format="webp", extra_body={"seed": 3})
    names = ["scene.png", "ring.jpg", "stripes.webp"]
    check(content(images.data[0]), prompt=SHAPES, size="64x80", seed=3, images=names, output_format="webp")


def test_edit_with_mask():
    for names in (["scene.png"], ["scene.png", "ring.jpg"]):
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(IMAGES / name, "rb")) for name in (*names, "mask.png")]
            images = client().images.edit(prompt=SHAPES, image=files[:-1], mask=files[-1], extra_body={"seed": 3})
        check(content(images.data[0]), prompt=SHAPES, seed=3, images=names, mask="mask.png")


def completed(events, name, partial_images, size):
    """Checks the events of a stream, and returns the last one."""
    *partial, last = events
    equal([event.type for event in events], [f"{name}.partial_image"] * partial_images + [f"{name}.completed"])
    equal([event.partial_image_index for event in partial], list(range(partial_images)))
    for event in partial:
        harness.check_preview(content(event), size)
    for event in events:
        equal((event.size, event.output_format), (size, "png"))
        assert event.created_at and event.background and event.quality
    harness.check_usage(last.usage.to_dict(), edits=name == "image_edit")
    return last


def test_stream():
    for extra in ({}, {"preview": "full"}):
        stream = client().images.generate(
            prompt=STAR, size=SIZE, stream=True, partial_images=2, extra_body={"seed": 7, **extra}
        )
        last = completed(list(stream), "image_generation", 2, SIZE)
        equal(last.seed, 7)
        check(content(last), prompt=STAR, size=SIZE, seed=7)


def test_stream_of_an_edit():
    with open(IMAGES / "scene.png", "rb") as image, open(IMAGES / "mask.png", "rb") as mask:
        stream = client().images.edit(
            prompt=SHAPES, image=image, mask=mask, stream=True, partial_images=1, extra_body={"seed": 3}
        )
        last = completed(list(stream), "image_edit", 1, SIZE)
    check(content(last), prompt=SHAPES, seed=3, images=["scene.png"], mask="mask.png")


def test_stream_of_several_images():
    stream = client().images.generate(prompt=STAR, size=SIZE, n=2, stream=True, extra_body={"seed": 11})
    events = list(stream)
    equal([event.type for event in events], ["image_generation.completed"] * 2)
    equal([(event.index, event.seed) for event in events], [(0, 11), (1, 12)])
    for event in events:
        check(content(event), prompt=STAR, size=SIZE, seed=event.seed)


def test_stream_that_is_left():
    # The images would take many seconds. Leaving the loop cancels them.
    with client().images.generate(prompt=STAR, n=10, stream=True, partial_images=3) as stream:
        for _ in stream:
            break
    start = time.monotonic()
    client().images.generate(prompt=STAR, size="64x64", extra_body={"seed": 7})
    assert time.monotonic() - start < 5, "images that nobody waits for were not canceled"


def test_stream_with_an_error():
    fields = {"prompt": STAR, "stream": True, "size": "100x64"}
    failure(openai.BadRequestError, 400, "invalid_value", "size", lambda: client().images.generate(**fields))


def test_errors():
    rows = [
        ({"size": "100x64"}, "invalid_value", "size", "x64"),
        ({"size": "large"}, "invalid_value", "size", "auto"),
        ({"n": 11}, "invalid_value", "n", "10"),
        ({"background": "transparent"}, "unsupported_value", "background", "opaque"),
        ({"output_format": "gif"}, "unsupported_value", "output_format", "png"),
        ({"response_format": "file"}, "unsupported_value", "response_format", "b64_json"),
        ({"partial_images": 2}, "invalid_value", "partial_images", "stream"),
        ({"extra_body": {"seed": -2}}, "invalid_value", "seed", "-1"),
        ({"extra_body": {"steps": "many"}}, "invalid_value", "steps", "64"),
        ({"extra_body": {"images": ["https://example.com/a.png"]}}, "remote_images_not_supported", "images[0]", "never"),
        ({"prompt": "a\0b"}, "invalid_value", "prompt", "NUL"),
    ]
    for fields, code, param, words in rows:
        call = lambda: client().images.generate(**{"prompt": STAR, **fields})
        error = failure(openai.BadRequestError, 400, code, param, call, words)
        equal(error.type, "invalid_request_error")


def test_unknown_model():
    call = lambda: client().images.generate(prompt=STAR, model="stable-diffusion-3")
    failure(openai.NotFoundError, 404, "model_not_found", "model", call, "builtin")


def test_unknown_route():
    if hasattr(client().images, "create_variation"):
        call = lambda: client().images.create_variation(image=(IMAGES / "scene.png").read_bytes())
        failure(openai.NotFoundError, 404, "not_found", None, call, "edits")
    call = lambda: client().chat.completions.create(model="kiln", messages=[{"role": "user", "content": "hello"}])
    failure(openai.NotFoundError, 404, "not_found", None, call)


def test_damaged_images():
    good, text = (IMAGES / "scene.png").read_bytes(), b"This is no image."

    def row(param, **fields):
        failure(openai.BadRequestError, 400, "invalid_image", param, lambda: client().images.edit(prompt=SHAPES, **fields))

    row("image[0]", image=text)
    row("image[0]", image=b"")
    row("image[1]", image=[good, good[:200]])
    row("image[2]", image=[good, good, text])
    row("mask", image=good, mask=text)
    row("mask", image=good, mask=(IMAGES / "ring.jpg").read_bytes())
    row("mask", image=good, mask=(IMAGES / "small-mask.png").read_bytes())
    call = lambda: client().images.edit(prompt=SHAPES, image=good, mask=(IMAGES / "mask.png").read_bytes(), size="64x64")
    failure(openai.BadRequestError, 400, "invalid_value", "size", call)


def test_unknown_fields():
    extra = {"seed": 7, "sampler_name": "euler", "clip": {"skip": 1}}
    raw = client().images.with_raw_response.generate(prompt=STAR, size=SIZE, extra_body=extra)
    equal(sorted(name.strip() for name in raw.headers["x-kiln-ignored"].split(",")), ["clip", "sampler_name"])
    check(content(raw.parse().data[0]), prompt=STAR, size=SIZE, seed=7)


def test_names_of_other_servers():
    extra = {"seed": 7, "num_inference_steps": 2, "width": 96, "height": 64}
    images = client().images.generate(prompt=STAR, extra_body=extra)
    check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7, steps=2)


def test_error_of_the_server():
    # A retry would fail as well, so the answer forbids it.
    sender = client()
    call = lambda: sender.images.generate(prompt=STAR, size=SIZE, extra_body={"lora": "overflow"})
    failure(openai.InternalServerError, 500, "not_finite", None, call)
    equal([(status, headers.get("x-should-retry")) for status, headers, _ in sender.answers], [(500, "false")])
    # The next request is as good as any.
    images = sender.images.generate(prompt=STAR, size=SIZE, extra_body={"seed": 7})
    check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7)


def test_idempotency_key():
    fields = {"prompt": STAR, "size": "64x64", "extra_headers": {"Idempotency-Key": "once"}}
    images = [client().images.generate(**fields).data[0] for _ in range(3)]
    equal(len({image.b64_json for image in images}), 1)
    call = lambda: client().images.generate(**{**fields, "prompt": SHAPES})
    failure(openai.UnprocessableEntityError, 422, "invalid_value", None, call, "idempotency")


def test_async_client():
    async def generate():
        async with openai.AsyncOpenAI(base_url=main.url, api_key="none") as sender:
            whole = sender.images.generate(prompt=STAR, size=SIZE, extra_body={"seed": 7})
            stream = await sender.images.generate(prompt=STAR, size=SIZE, stream=True, partial_images=1, extra_body={"seed": 7})
            return await whole, [event async for event in stream]

    images, events = asyncio.run(generate())
    check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7)
    check(content(completed(events, "image_generation", 1, SIZE)), prompt=STAR, size=SIZE, seed=7)


def test_base_url_without_version():
    images = client(base_url=main.address).images.generate(prompt=STAR, size=SIZE, extra_body={"seed": 7})
    check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7)


def test_keys():
    for key in ("sk-another-key", KEY[:-1]):
        call = lambda: Client(busy, api_key=key).images.generate(prompt=STAR, size=SIZE)
        error = failure(openai.AuthenticationError, 401, "invalid_api_key", None, call)
        equal((error.type, error.response.headers["www-authenticate"].split()[0]), ("authentication_error", "Bearer"))
        assert key not in str(error)
    sender = Client(busy, api_key=KEY)
    assert list(sender.models.list())
    images = sender.images.generate(prompt=STAR, size=SIZE, response_format="url", extra_body={"seed": 7})
    # The random URL is its own permission.
    with urllib.request.urlopen(images.data[0].url) as answer:
        check(answer.read(), prompt=STAR, size=SIZE, seed=7)


def small(seed):
    """A request for a small image. Each has a seed of its own: one that is the same as a waiting one would share its image."""
    return {"prompt": STAR, "size": "64x64", "extra_body": {"seed": seed}}


def test_retry_when_the_queue_is_full():
    running = in_background(lambda: Client(busy, api_key=KEY).images.generate(**SLOW))
    busy.wait_for_queue(0)
    waiting = in_background(lambda: Client(busy, api_key=KEY).images.generate(**small(8)))
    busy.wait_for_queue(1)
    hasty = Client(busy, api_key=KEY, max_retries=0)
    error = failure(openai.RateLimitError, 429, "queue_full", None, lambda: hasty.images.generate(**small(9)))
    equal(error.type, "rate_limit_error")
    # On a busy machine the image may take longer than predicted, and two tries may not be enough.
    patient = Client(busy, api_key=KEY, max_retries=20)
    raw = patient.images.with_raw_response.generate(**small(7))
    assert raw.retries_taken > 0, "nothing was retried"
    equal([status for status, _, _ in patient.answers], [429] * raw.retries_taken + [200])
    for (_, headers, before), (_, _, after) in zip(patient.answers, patient.answers[1:]):
        seconds = int(headers["retry-after"])
        assert 1 <= seconds <= 60 and after - before > seconds - 0.1, (seconds, after - before)
    for images, seed in ((waiting(), 8), (raw.parse(), 7)):
        check(content(images.data[0]), prompt=STAR, size="64x64", seed=seed)
    harness.check_slow(content(running().data[0]))


def test_request_before_the_server_is_ready():
    with harness.Server(waits=False) as server:
        sender = Client(server, max_retries=20)
        images = sender.images.generate(**small(7))
        check(content(images.data[0]), prompt=STAR, size="64x64", seed=7)
        *early, (status, _, _) = sender.answers
        equal((status, {status for status, _, _ in early} - {503}), (200, set()))
        assert all(1 <= int(headers["retry-after"]) <= 60 for _, headers, _ in early)


def test_end_of_the_server():
    body = json.dumps({"prompt": STAR, "size": "64x64"}).encode()
    late = http.client.HTTPConnection(busy.address.removeprefix("http://"), timeout=20)
    late.putrequest("POST", "/v1/images/generations")
    for name, value in {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Content-Length": len(body)}.items():
        late.putheader(name, str(value))
    late.endheaders(body[:5])
    sender = Client(busy, api_key=KEY, max_retries=0)
    assert list(sender.models.list())
    running = in_background(lambda: Client(busy, api_key=KEY).images.generate(**SLOW))
    busy.wait_for_queue(0)
    busy.terminate()
    time.sleep(0.2)
    # The server makes what it has begun, and nothing new.
    late.send(body[5:])
    answer = late.getresponse()
    error = json.load(answer)["error"]
    equal((answer.status, error["code"], error["type"], error["param"]), (503, "shutting_down", "server_error", None))
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    # The SDK's open connection is closed, or has the same answer.
    try:
        sender.images.generate(prompt=STAR, size="64x64")
        raise AssertionError("the server took a new request")
    except openai.APIConnectionError:
        pass
    except openai.InternalServerError as error:
        equal((error.status_code, error.code), (503, "shutting_down"))
    harness.check_slow(content(running().data[0]))
    equal(busy.wait(), 143)


if __name__ == "__main__":
    main, busy = harness.main_server(), harness.busy_server()
    with main, busy:
        code = harness.run(f"openai-python {openai.__version__}", sys.modules["__main__"])
    sys.exit(code)
