"""Tests the server with LiteLLM. Its generations go through openai-python, and it sends edits itself. It has no streams of images."""

import base64
import os
import sys
import urllib.request
from importlib.metadata import version

import harness
from harness import IMAGES, KEY, SHAPES, SIZE, SLOW, STAR, check, equal, in_background

# Nothing is fetched from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

litellm.suppress_debug_info = True

main = busy = None


def generate(server=None, key="none", model="gpt-image-1", **fields):
    options = {"model": f"openai/{model}", "api_base": (server or main).url, "api_key": key, "timeout": 60}
    return litellm.image_generation(**{"prompt": STAR, **options, **fields})


def edit(server=None, key="none", **fields):
    options = {"model": "openai/gpt-image-1", "api_base": (server or main).url, "api_key": key, "timeout": 60}
    return litellm.image_edit(**{"prompt": SHAPES, **options, **fields})


def content(data):
    return base64.b64decode(data.b64_json, validate=True)


def headers(images):
    return images._hidden_params["headers"]


def files(*names):
    """Files in memory, because LiteLLM reads them to their end."""
    return [(IMAGES / name).read_bytes() for name in names]


def failure(kind, status, code, param, call):
    """Checks the exception that a call raises. LiteLLM has no members for code and param, and quotes the answer in its message."""
    try:
        call()
    except Exception as error:
        assert type(error) is kind and error.status_code == status, f"{error!r} is no {kind}"
        text = str(error).replace('"', "'").replace("': '", "':'")
        assert f"'code':'{code}'" in text, error
        assert param is None or f"'param':'{param}'" in text, error
        return
    raise AssertionError(f"{code} was expected")


def test_formats():
    for output_format in ("png", "jpeg", "webp"):
        images = generate(size=SIZE, output_format=output_format, seed=7)
        check(content(images.data[0]), prompt=STAR, size=SIZE, seed=7, output_format=output_format)
        equal((images.size, images.output_format, headers(images)["x-kiln-seed"]), (SIZE, output_format, "7"))
        assert headers(images)["x-request-id"]
        harness.check_usage(images.usage.model_dump())


def test_url():
    images = generate(model="dall-e-2", size=SIZE, response_format="url", extra_body={"seed": 7})
    with urllib.request.urlopen(images.data[0].url) as answer:
        check(answer.read(), prompt=STAR, size=SIZE, seed=7)


def test_several_images():
    images = generate(size=SIZE, n=2, extra_body={"seed": 11})
    for image, seed in zip(images.data, (11, 12), strict=True):
        check(content(image), prompt=STAR, size=SIZE, seed=seed)
    harness.check_usage(images.usage.model_dump(), images=2)


def test_size_of_the_model():
    images = generate(size="auto", extra_body={"seed": 7})
    equal(images.size, "256x256")
    check(content(images.data[0]), prompt=STAR, seed=7)


def test_unknown_fields():
    equal(headers(generate(model="kiln", size=SIZE, seed=7, sampler_name="euler"))["x-kiln-ignored"], "sampler_name")


def test_edit():
    images = edit(image=files("scene.png"), extra_body={"seed": 3})
    equal(images.size, SIZE)
    check(content(images.data[0]), prompt=SHAPES, seed=3, images=["scene.png"])
    usage = images.usage.model_dump()
    assert usage["input_tokens_details"]["image_tokens"] > 0, usage


def test_edit_of_three_images():
    names = ["scene.png", "ring.jpg", "stripes.webp"]
    images = edit(image=files(*names), size="64x80", extra_body={"seed": 3})
    check(content(images.data[0]), prompt=SHAPES, size="64x80", seed=3, images=names)


def test_edit_with_mask():
    images = edit(image=files("scene.png"), mask=files("mask.png")[0], extra_body={"seed": 3})
    check(content(images.data[0]), prompt=SHAPES, seed=3, images=["scene.png"], mask="mask.png")


def test_errors():
    failure(litellm.BadRequestError, 400, "invalid_value", "size", lambda: generate(size="100x64"))
    failure(litellm.NotFoundError, 404, "model_not_found", "model", lambda: generate(model="stable-diffusion-3"))
    failure(litellm.InternalServerError, 500, "not_finite", None, lambda: generate(size=SIZE, extra_body={"lora": "overflow"}))
    damaged = [*files("scene.png"), b"This is no image."]
    failure(litellm.BadRequestError, 400, "invalid_image", "image[1]", lambda: edit(image=damaged))
    small = files("small-mask.png")[0]
    failure(litellm.BadRequestError, 400, "invalid_image", "mask", lambda: edit(image=files("scene.png"), mask=small))


def test_keys():
    failure(litellm.AuthenticationError, 401, "invalid_api_key", None, lambda: generate(busy, key="sk-another-key", size=SIZE))
    failure(litellm.AuthenticationError, 401, "invalid_api_key", None, lambda: edit(busy, image=files("scene.png")))
    check(content(generate(busy, KEY, size=SIZE, seed=7).data[0]), prompt=STAR, size=SIZE, seed=7)


def test_retry_when_the_queue_is_full():
    # Each request has a seed of its own: one that is the same as a waiting one would share its image.
    running = in_background(lambda: generate(busy, KEY, **SLOW))
    busy.wait_for_queue(0)
    waiting = in_background(lambda: generate(busy, KEY, size="64x64", extra_body={"seed": 8}))
    busy.wait_for_queue(1)
    # Only generations are sent again.
    failure(litellm.RateLimitError, 429, "queue_full", None, lambda: edit(busy, KEY, image=files("scene.png")))
    # LiteLLM always tries three times, and waits in between. On a busy machine an image may take longer than that.
    for is_last in (False, False, True):
        try:
            images = generate(busy, KEY, size="64x64", extra_body={"seed": 7})
            break
        except litellm.RateLimitError:
            if is_last:
                raise
    check(content(images.data[0]), prompt=STAR, size="64x64", seed=7)
    check(content(waiting().data[0]), prompt=STAR, size="64x64", seed=8)
    harness.check_slow(content(running().data[0]))


if __name__ == "__main__":
    main, busy = harness.main_server(), harness.busy_server()
    with main, busy:
        code = harness.run(f"litellm {version('litellm')}", sys.modules["__main__"])
    sys.exit(code)
