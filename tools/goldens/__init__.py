"""Rebuild (or check) the reference outputs under tests/fixtures, and two files under models.

    pip install -r tools/requirements.txt
    python tools/goldens                    # write all but ranks
    python tools/goldens klein modes        # write some
    python tools/goldens --check            # recompute and compare, exit 1 on mismatch

    klein            goldens.*              text to image, and models/tiny/tokenizer.json
    modes            modes.*                references, negative prompts, the KV model and the other modes
    editing          editing.*              init images, masks, and Pillow's resizing and compositing
    lora             lora.*                 adapters: each spelling of LoRA and LoKr
    dev              dev.*, dev_turbo.*     FLUX.2 [dev]
    tiling           tiling.*               the VAE in tiles
    quantized        quantized.*            FP8, NVFP4 and mixed files
    builtin          builtin.*              the built-in model; again whenever its weights change
    tokens           tokens.json            token ids
    tokens_mistral   tokens_mistral.json    token ids of FLUX.2 [dev]; --json FILE writes its tokenizer.json instead, 17 MB
    references       references*, layouts.* reference images, and the pixels that Pillow reads from them
    ranks            models/mistral/ranks.gz  the vocabulary of FLUX.2 [dev]; needs mistral-common, or --wheel FILE

Each module describes its files. Nothing is downloaded, and nothing is random but the seeded initial noise.

Most are outputs of the diffusers pipelines on a model small enough to run on a CPU in seconds: the real classes, with a few narrow
layers, a byte-level tokenizer and weights made by an integer hash of the tensor name.

Weights. With h = FNV-1a 64 of the tensor's name in UTF-8 and i the flat index, k is the top byte of splitmix64's output for the
state h + (i + 1) * GAMMA, and

    rank >= 2                          (2k - 255) / 256 * 2^-e, where e is the smallest integer >= 0 with 4^(e+1) >= fan-in, and
                                       fan-in the product of all dimensions but the first
    rank 1, *.weight, *.running_var    1 + ((k & 127) - 64) / 128; twice that for the transformer's query and key norms
    rank 1, anything else              (2k - 255) / 256 / 8

so that activations keep a size of order one, attention is sharp enough to show a wrong position, and every weight is exact in
bf16.

bf16 errors. The relative L2 distance of the pipeline in bf16 from fp32 is the yardstick for an engine that computes in bf16. It is
measured with the unmodified pipeline (bf16_relative_l2), and with the time embedding given the exact timestep
(bf16_exact_time_relative_l2). The pipeline rounds the timestep to bf16, an error much larger than all others.
"""
