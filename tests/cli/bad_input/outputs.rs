//! Outputs that cannot be written.

use super::*;
use std::os::unix::fs::symlink;

/// What `kiln quantize` would write through, or to what it reads.
#[test]
fn quantized_outputs_that_cannot_be_written() {
    let sandbox = prepared();
    let model = "model/flux-2-klein-tiny.safetensors";
    fs::hard_link(sandbox.path(model), sandbox.path("same.safetensors")).unwrap();
    fs::create_dir(sandbox.path("empty")).unwrap();
    fs::create_dir(sandbox.path("full")).unwrap();
    write(&sandbox, "full/file", "mine");
    symlink("empty", sandbox.path("to-empty")).unwrap();
    // Journals that kiln could have begun, and links where it writes first.
    for (name, to) in [("a.safetensors", "there.png"), ("b", "full"), ("c", "no/where")] {
        symlink(to, sandbox.path(&format!("{name}.tmp"))).unwrap();
        write(&sandbox, &format!("{name}.tmp.json"), "{\"request\":{\"version\":\n");
    }
    fs::hard_link(sandbox.path("there.png"), sandbox.path("d.safetensors.tmp")).unwrap();
    write(&sandbox, "d.safetensors.tmp.json", "{\"request\":{\"version\":\n");
    symlink("there.png", sandbox.path("e.safetensors.tmp.json")).unwrap();
    let line = |input: &str, out: &str, flags: &str| format!("quantize {input} {out} --to fp8 --no-calibration -q{flags}");
    let cannot = |name: &str, why: &str| format!("cannot write ({name}): {why}");
    let source = "this is one of the files that are read; use another name";
    let link = "this is a link or a device, through which kiln does not write; move it away";
    let to_folder = "this is a symbolic link; name the folder that it leads to";
    let foreign = "kiln writes here first, but this exists and kiln did not begin it; move it away";
    let name = Is("name a file that ends in .safetensors for one part, or a folder for a model");
    let mut rows = vec![
        row(&line(model, model, ""), 5, cannot(model, source), Nothing),
        row(&line(model, model, " --force"), 5, cannot(model, source), Nothing),
        row(&line(model, "same.safetensors", " --force"), 5, cannot("same.safetensors", source), Nothing),
        row(&line("model", "model/ae.safetensors", " --force"), 5, cannot("model/ae.safetensors", source), Nothing),
        row(&line("model", "to-empty", ""), 5, cannot("to-empty", to_folder), Nothing),
        row(&line("model", "to-empty/", ""), 5, cannot("to-empty", to_folder), Nothing),
        row(&line("model", "e.safetensors", ""), 5, cannot("e.safetensors.tmp.json", foreign), Nothing),
        row(&line("model", "out.gguf", ""), 2, "quantize writes no .gguf files: out.gguf", name),
        row(&line("model", "a/out.CKPT", " --part text-encoder"), 2, "quantize writes no .CKPT files: a/out.CKPT", name),
        row(&line("model", "-", ""), 2, "quantize writes a file or a folder, not standard output", name),
    ];
    for out in ["a.safetensors", "b", "c"] {
        for flags in ["", " --force", " --restart"] {
            rows.push(row(&line("model", out, flags), 5, cannot(&format!("{out}.tmp"), link), Nothing));
        }
    }
    check(&sandbox, &rows);
    // A second name of another file is given up with --restart, and the other file stays.
    let restarted = line("model", "d.safetensors", " --restart");
    sandbox.run(restarted.split(' ')).good();
    assert_eq!(fs::read(sandbox.path("there.png")).unwrap(), b"mine");
}

#[test]
fn outputs_that_cannot_be_written() {
    let sandbox = prepared();
    symlink("nowhere", sandbox.path("dangling.png")).unwrap();
    symlink("there.png", sandbox.path("link.png")).unwrap();
    for name in ["folder.png", "full", "locked"] {
        fs::create_dir(sandbox.path(name)).unwrap();
    }
    let quick = |line: &str| format!("{line} {}", QUICK.join(" "));
    let exists = |name: &str| format!("output exists ({name}); not overwritten");
    let cannot = |name: &str, why: &str| format!("cannot write ({name}): {why}");
    let force = Is("use --force or another name");
    let link = "this is a symbolic link; name the file that it leads to";
    let other = "this is not a dump, and --dump replaces nothing else; use another name";
    let format = "kiln writes files named .png, .jpg, .jpeg or .webp";
    let mut rows = vec![
        row("x -q -o there.png", 5, exists("there.png"), force),
        row("x -q -o new.png --dump there.png", 5, exists("there.png"), force),
        row(
            "x -q --model model -o new.png --dump model/ae.safetensors --force",
            5,
            cannot("model/ae.safetensors", other),
            Nothing,
        ),
        row("x -q -o dangling.png", 5, cannot("dangling.png", link), Nothing),
        row("x -q -o link.png", 5, cannot("link.png", link), Nothing),
        row("x -q -o link.png --force", 5, cannot("link.png", link), Nothing),
        row("x -q -o new.png --dump link.png --force", 5, cannot("link.png", link), Nothing),
        row("x -q -o /dev/full", 5, cannot("/dev/full", "this is not a regular file"), Nothing),
        row("x -q -o /dev/full --force", 5, cannot("/dev/full", "this is not a regular file"), Nothing),
        row("x -q -o /dev/stdout --force", 5, cannot("/dev/stdout", "this is standard output, which is called `-`"), Nothing),
        row("x -q -o folder.png --force", 5, cannot("folder.png", "this is a folder"), Nothing),
        row("x -q -o no/new.png", 5, cannot("no/new.png", "there is no such folder"), Nothing),
        row("x -q -o there.png/new.png", 5, cannot("there.png/new.png", "there is no such folder"), Nothing),
        row("x -q -o new.gif", 5, cannot("new.gif", format), Nothing),
        row(
            "x -q -o new.png --format jpeg",
            2,
            "--format jpeg is not what the name of the file says (new.png)",
            Is("leave out --format, or name it .jpg"),
        ),
        row(
            "x -q -o new.webp --quality 80",
            2,
            "--quality is about JPEG, --format webp is lossless",
            Is("leave out --quality, or use --format jpeg and a name to match"),
        ),
        row("x -q -o new.v2", 5, cannot("new.v2", format), Nothing),
        row(
            "run there.png -o there.png",
            2,
            "--output is not a folder (there.png)",
            Is("name a folder; kiln creates one that does not exist"),
        ),
        row("run there.png -o there.png/new", 5, cannot("there.png/new", "Not a directory (os error 20)"), Nothing),
        row(
            "x -q -o - --count 2",
            2,
            "--output - is about one image, --count 2 asks for more",
            Is("leave out --count, or --output -"),
        ),
        row(
            "x -q -o - --json",
            2,
            "the image and its JSON would both go to standard output",
            Is("leave out --json, or name a file"),
        ),
        row(
            "x -q -o new.png --dump -",
            2,
            "--dump writes a file, not standard output",
            Is("name a file, such as run.safetensors"),
        ),
        row(
            "bench -q --json times.json",
            2,
            "`times.json` would be the prompt, not the file of --json",
            Is("write --json=times.json"),
        ),
        // Blocks of 512 bytes; the image has about 12 thousand.
        row(&quick("x -q -o new.png"), 5, cannot("new.png", "File too large (os error 27); nothing was written"), Nothing)
            .within("ulimit -f 8"),
    ];
    // Mounting may not be permitted on this machine.
    let may_mount = "mount -t tmpfs none full";
    let mut probe = sandbox.wrapped("unshare");
    if probe.args(["--map-root-user", "--mount", "sh", "-c", may_mount]).output().is_ok_and(|output| output.status.success()) {
        let full = "No space left on device (os error 28); nothing was written";
        rows.extend([
            row(&quick("x -q -o full/new.png"), 5, cannot("full/new.png", full), Nothing)
                .within("mount -t tmpfs -o size=8k none full"),
            row("x -q -o locked/new.png", 5, cannot("locked/new.png", "Read-only file system (os error 30)"), Nothing)
                .within("mount -t tmpfs -o ro none locked"),
            // The disk has room for one image, and for each of them alone.
            row(
                &quick("x -q -o full/new.png --count 40"),
                5,
                cannot("full/new-1.png", "all files together need up to 1,193,000 bytes, 406,657 are free; nothing was written"),
                Nothing,
            )
            .within("mount -t tmpfs -o size=400k none full"),
        ]);
    } else {
        let _ = writeln!(std::io::stderr(), "skipped: a full and a read-only disk");
    }
    check(&sandbox, &rows);
}
