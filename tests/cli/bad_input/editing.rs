//! Init images and masks.

use super::*;

#[test]
fn edits_that_are_none() {
    let sandbox = prepared();
    sandbox.write_png("init.png", 96, 64, |x, y| [x as u8, y as u8, 9]);
    sandbox.write_png("mask.png", 96, 64, |x, _| [if x < 20 { 255 } else { 0 }; 3]);
    sandbox.write_png("small.png", 64, 64, |_, _| [255; 3]);
    sandbox.write_png("black.png", 96, 64, |_, _| [7; 3]);
    write(&sandbox, "moving.webp", b"RIFF\x1A\0\0\0WEBPANIM\x06\0\0\0\0\0\0\0\0\0VP8 \0\0\0\0");
    let usage = |line: &str, first: &str, hint: &'static str| row(&format!("x -q {line}"), 2, first, Is(hint));
    let file = |line: &str, first: &str, hint: &'static str| row(&format!("x -q --init init.png {line}"), 3, first, Is(hint));
    let rules = "paint white on black, or make transparent, what is to be repainted";
    let parse = |line: &str, first: &str| row(&format!("x -q --init init.png {line}"), 2, first, Help);
    check(
        &sandbox,
        &[
            usage("--mask mask.png", "--mask says what of an init image is repainted, and there is none", "name one with --init"),
            usage("--extend 64", "--extend widens an init image, and there is none", "name one with --init"),
            usage(
                "--strength 0.5",
                "--strength says how much of an init image changes, and there is none",
                "name one with --init",
            ),
            usage(
                "--feather 8",
                "--feather fades out what is repainted of an init image, and there is none",
                "name one with --init",
            ),
            usage("--mask-crop 64", "--mask-crop crops an init image, and there is none", "name one with --init"),
            usage("--init-reference on", "--init-reference is about an init image, and there is none", "name one with --init"),
            usage(
                "--init init.png --feather 8",
                "--feather fades out what is repainted, and there is no mask",
                "name one with --mask",
            ),
            usage("--init init.png --mask-crop 64", "--mask-crop crops around a mask, and there is none", "name one with --mask"),
            usage(
                "--init init.png --extend 64 --strength 0.9",
                "--extend needs a strength of 1: the new part holds nothing to start from",
                "leave out --strength",
            ),
            usage(
                "--init init.png --mask mask.png --mask-crop 64 --extend 16",
                "--mask-crop keeps the size of the image, and --extend changes it",
                "leave out one of them",
            ),
            usage(
                "--init init.png --mask mask.png --mask-crop 64 --width 64",
                "--mask-crop keeps the size of the image, and --width changes it",
                "leave out one of them",
            ),
            usage(
                "--init init.png --aspect 1:1",
                "--aspect is given together with --init, whose image has a shape",
                "give --width and --height, which crop it",
            ),
            usage(
                "--aspect 1:1 --width 64 --height 64",
                "--aspect is given together with --width and --height",
                "leave out one of them",
            ),
            usage(
                "--megapixels 1 --width 64",
                "--megapixels is given together with --width and --height",
                "leave out one of them",
            ),
            file(
                "--mask small.png",
                "cannot use the mask (small.png): it is 64x64, the init image 96x64",
                "both sizes count after EXIF rotation",
            ),
            file("--mask black.png", "cannot use the mask (black.png): nothing of it is white or transparent", rules),
            file("--mask init.png", "cannot use the mask (init.png): it has colors, so it is an image and no mask", rules),
            file(
                "--mask moving.webp",
                "cannot read image (moving.webp): content is an animated WebP, and only still images are read",
                "convert to PNG, JPEG or WebP",
            ),
            row("x -q --init none.png", 3, "cannot read (none.png): No such file or directory (os error 2)", Nothing),
            parse("--strength 0", "invalid value '0' for '--strength <S>': expected a number above 0, at most 1"),
            parse("--strength 1.01", "invalid value '1.01' for '--strength <S>': expected a number above 0, at most 1"),
            parse("--strength nan", "invalid value 'nan' for '--strength <S>': expected a number above 0, at most 1"),
            parse(
                "--extend 250",
                "invalid value '250' for '--extend <SIDES>': left is 250, and has to be a multiple of 16, at most 16384",
            ),
            parse(
                "--mask mask.png --feather 257",
                "invalid value '257' for '--feather <PX>': expected a whole number from 0 to 256",
            ),
            parse(
                "--aspect 17:1",
                "invalid value '17:1' for '--aspect <W:H>': expected a width and a height, at most 16 times one another",
            ),
        ],
    );
}
