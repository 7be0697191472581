//! `kiln bench` with the real program: its output, the sum of its times, what it refuses, and that it leaves no files behind.

use common::random::long;
use common::sandbox::{QUICK, Sandbox, send};
use serde_json::Value;
use std::path::Path;

/// The seconds of each stage of an image, without single steps.
fn stages(times: &Value) -> Vec<(String, f64)> {
    let object = times.as_object().unwrap();
    object.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect()
}

fn check_times(times: &Value, stage_names: &[&str], steps: usize) {
    let stages = stages(times);
    let of = |name: &str| stages.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{name}: {times}")).1;
    let mut names: Vec<&str> = stages.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let mut expected = [stage_names, &["encode", "denoise", "decode", "png", "rest", "total"]].concat();
    expected.sort_unstable();
    assert_eq!(names, expected);
    let sum: f64 = stages.iter().filter(|(name, _)| name != "total").map(|(_, seconds)| seconds).sum();
    assert!((sum - of("total")).abs() < 1e-6, "{sum} in {times}");
    assert!(stages.iter().all(|(_, seconds)| *seconds >= 0.0) && of("denoise") > 0.0 && of("decode") > 0.0);
    // Time outside of all stages is a small part of the total, unless other programs have the core then.
    assert!(!long() || of("rest") < 0.5 * of("total"), "{times}");
    let steps_s: Vec<f64> = times["steps"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    assert_eq!(steps_s.len(), steps);
    assert!(steps_s.iter().all(|s| *s > 0.0) && steps_s.iter().sum::<f64>() <= of("denoise"), "{times}");
}

#[test]
fn a_table_has_a_row_for_each_stage() {
    let sandbox = Sandbox::with_tiny();
    let run = sandbox.quick(&["bench", "--runs", "3"]);
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
    let lines: Vec<&str> = run.text().lines().collect();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(lines[0], format!("kiln {version}, tiny random model (built in, not trained), 64x64, 1 steps, f32"));
    assert!(lines[1].starts_with("cpu, ") && lines[1].ends_with(" threads"), "{}", lines[1]);
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(cells(lines[3]), ["ms", "cold", "warm", "median", "min", "max"]);
    let number = |cell: &String| cell.parse::<f64>().unwrap();
    let mut at = 4;
    for (stage, figures) in [
        ("open", 1),
        ("load", 1),
        ("encode", 4),
        ("denoise", 4),
        ("  a step", 4),
        ("decode", 4),
        ("png", 4),
        ("rest", 4),
        ("total", 4),
    ] {
        let rest = lines[at].strip_prefix(stage).unwrap_or_else(|| panic!("{stage}: {}", lines[at]));
        let figures_here: Vec<f64> = cells(rest).iter().map(number).collect();
        assert_eq!(figures_here.len(), figures, "{}", lines[at]);
        if let [_, median, min, max] = figures_here[..] {
            assert!(min <= median && median <= max, "{}", lines[at]);
        }
        at += 1;
    }
    assert!(lines[at + 1].starts_with("memory ") && lines[at + 1].contains(" MiB of weights + "), "{}", lines[at + 1]);
    assert!(lines[at + 2].contains("not measured: only GPUs report it"), "{}", lines[at + 2]);
    assert_eq!(lines[at + 3], "formats     all bf16");
    assert_eq!(lines.len(), at + 4, "{}", run.text());
    // The first image shows the usual progress, each warm one has a single line.
    for line in ["denoising ", "warm image 1 of 3: ", "warm image 3 of 3: "] {
        assert_eq!(run.stderr.lines().filter(|l| l.starts_with(line)).count(), 1, "{line}: {}", run.stderr);
    }
}

#[test]
fn what_is_shared_has_nothing_of_the_user() {
    let sandbox = Sandbox::new();
    sandbox.tiny("secret-folder", &[]);
    let prompt = "a prompt of my own";
    let run = sandbox.quick(&["bench", prompt, "--runs", "1", "--share", "--model", "secret-folder"]);
    let (table, block) = run.text().split_once("\n--- from here on: ").unwrap_or_else(|| panic!("{}", run.text()));
    assert!(table.contains("\ntotal ") && block.ends_with("\n--- up to here ---\n"), "{}", run.text());
    for line in ["kiln bench --share, kiln ", "\ncpu ", "\nmodel ", "\nencode ", "\na step ", "\ndecode ", "\ntotal "] {
        assert!(block.contains(line) || block.starts_with(line), "{line}: {block}");
    }
    assert!(block.contains("\nThere is no prediction: the CPU has none.\n"), "{block}");
    let root = sandbox.path("").display().to_string();
    for secret in [prompt, "secret-folder", root.trim_end_matches('/')] {
        assert!(!block.contains(secret), "{secret}: {block}");
    }
    // The block follows a table, which JSON on standard output would replace.
    let run = sandbox.run(["bench", "--share", "--json"]);
    assert!(run.code == Some(2) && run.stderr.contains("hint: write --json=FILE to have both"), "{}", run.stderr);
    assert_eq!(sandbox.run(["bench", "--share", "--kernels"]).code, Some(2));
}

#[test]
fn json_has_every_time_and_stages_add_up() {
    let sandbox = Sandbox::new();
    let image = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/references/rgb.png");
    let flags = ["bench", "x", "--runs", "2", "--json", "-q", "--model", "tiny", "--variant", "kv", "--reference", image];
    let run = sandbox.run(flags.iter().chain(&["--width", "80", "--height", "64", "--steps", "3"])).good();
    assert_eq!(run.stderr, "");
    assert!(sandbox.names().is_empty());
    let [report] = &run.json()[..] else { panic!("{}", run.text()) };
    for (key, value) in [
        ("kiln", Value::from(env!("CARGO_PKG_VERSION"))),
        ("kind", "images".into()),
        ("variant", "kv".into()),
        ("backend", "cpu".into()),
        ("precision", "bf16".into()),
        ("width", 80.into()),
        ("height", 64.into()),
        ("steps", 3.into()),
        ("guidance", Value::Null),
        ("references", 1.into()),
        ("formats", vec!["all bf16"].into()),
        ("saturated", 0.into()),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
    check_times(&report["cold_s"], &["open", "load", "references"], 3);
    let warm = report["warm_s"].as_array().unwrap();
    assert_eq!(warm.len(), 2);
    warm.iter().for_each(|times| check_times(times, &["references"], 3));
    let memory = &report["memory"];
    assert!(memory["planned_weights"].as_u64().unwrap() > 0 && memory["planned_working"].as_u64().unwrap() > 0);
    assert!(memory["measured"].is_null() && memory["holds"].is_null());
    assert!(report["kernels"].as_object().unwrap().is_empty());
}

#[test]
fn json_goes_to_a_new_file_beside_the_table() {
    let sandbox = Sandbox::new();
    let run = sandbox.quick(&["bench", "--runs", "1", "--json=times.json"]);
    assert!(run.text().contains("\ntotal "), "{}", run.text());
    assert_eq!(sandbox.names(), ["times.json"]);
    let report: Value = serde_json::from_slice(&std::fs::read(sandbox.path("times.json")).unwrap()).unwrap();
    check_times(&report["warm_s"][0], &[], 1);
    // An output that cannot be written is found before anything is measured.
    for (json, message) in [("--json=times.json", "times.json"), ("--json=none/times.json", "there is no such folder")] {
        let run = sandbox.run(["bench", json]);
        assert_eq!((run.code, run.text()), (Some(5), ""), "{}", run.stderr);
        assert!(run.stderr.contains(message) && !run.stderr.contains("denoising"), "{}", run.stderr);
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let sandbox = Sandbox::new();
    for (line, code, message) in [
        ("bench --runs 0", 2, "expected a whole number from 1 to 1000"),
        ("bench --width 65", 2, "65"),
        ("bench one two", 2, "more than one prompt"),
        ("bench --output a.png", 2, "unexpected argument '--output'"),
        ("bench --seed 1", 2, "unexpected argument '--seed'"),
        ("bench --quick", 2, "--kernels"),
        ("bench --kernels --steps 2", 2, "cannot be used with"),
        ("bench --kernels --attention fp8", 2, "cannot be used with"),
        ("bench --kernels=fox", 2, "no op has `fox` in its name"),
        ("bench --kernels --backend cuda", 6, "no usable GPU"),
        ("bench --model none", 3, "none"),
        ("bench --backend cuda", 6, "no usable GPU"),
    ] {
        let run = sandbox.run(line.split(' '));
        assert_eq!((run.code, run.text()), (Some(code), ""), "{line}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{line}: {}", run.stderr);
    }
    assert!(sandbox.names().is_empty());
}

#[test]
fn help_teaches() {
    let sandbox = Sandbox::new();
    let run = sandbox.run(["bench", "--help"]).good();
    for word in
        "--runs --json --kernels --quick --model --width --steps --reference --backend --device --precision --quantize --attention --fp8-accumulate --nvfp4-math --trace --svg --compare --from --on-request --keep Examples:".split(' ')
    {
        assert!(run.text().contains(word), "{word}");
    }
    assert!(run.text().lines().all(|line| line.chars().count() <= 100), "{}", run.text());
    assert!(sandbox.run(["--help"]).good().text().contains("bench"));
}

#[test]
fn kernels_are_timed_one_by_one() {
    let sandbox = Sandbox::new();
    let run = sandbox.run(["bench", "--kernels", "--quick", "--json=kernels.json"]).good();
    let report: Value = serde_json::from_slice(&std::fs::read(sandbox.path("kernels.json")).unwrap()).unwrap();
    for (key, value) in [("kind", "kernels"), ("backend", "cpu"), ("precision", "bf16"), ("scale", "quick")] {
        assert_eq!(report[key], value, "{key}");
    }
    assert!(report["tensor_flops"].is_null() && report["tensor_flops_e4m3"].is_null());
    let rows = report["rows"].as_array().unwrap();
    let table = run.text().split_once("\n\n").unwrap().1;
    assert_eq!(table.lines().count(), rows.len());
    for (row, line) in rows.iter().zip(table.lines()) {
        assert!(line.starts_with(row["op"].as_str().unwrap()) && line.contains(row["shape"].as_str().unwrap()), "{line}");
        assert!(line.contains(&format!(" {} ", row["format"].as_str().unwrap())), "{line}");
        assert!(line.contains(" us ±") && (line.contains("B/s") || line.contains("FLOP/s")), "{line}");
        assert_eq!(row["of_copy"].is_null(), !line.ends_with(" % of copy"), "{line}");
        assert_eq!(row["seconds"].as_array().unwrap().len(), 3);
        assert!(row["median_s"].as_f64().unwrap() > 0.0);
    }
    for op in kiln::device::OpKind::ALL {
        assert!(rows.iter().any(|row| row["op"] == op.name()), "{op:?}");
    }
    // The CPU takes every format: the layers of FP8 and NVFP4 models have rows of their own.
    for (op, format) in [
        ("linear", "W8A8"),
        ("linear_swiglu", "W8A8"),
        ("linear_gate_residual", "W8A8"),
        ("qkv_norm_rope", "W8A8"),
        ("qkv_mlp", "W8A8"),
        ("linear_swiglu", "W8A16"),
        ("linear", "W4A4"),
        ("linear_swiglu", "W4A4"),
        ("linear_gate_residual", "W4A4"),
        ("qkv_norm_rope", "W4A4"),
        ("qkv_mlp", "W4A4"),
        ("layer_norm_modulate", "NVFP4"),
        ("linear_swiglu", "W4A16"),
        ("linear_gate_residual", "W4A16"),
        ("qkv_norm_rope", "W4A16"),
        ("qkv_mlp", "W4A16"),
        ("layer_norm_modulate", "e4m3"),
        ("attention", "e4m3"),
    ] {
        let row = rows.iter().find(|row| row["op"] == op && row["format"] == format).unwrap_or_else(|| panic!("{op} {format}"));
        let (all, e4m3) = (row["flops"].as_u64().unwrap(), row["flops_e4m3"].as_u64().unwrap());
        let share = if format == "W8A8" {
            all
        } else if op == "attention" {
            all / 2
        } else {
            0
        };
        assert_eq!(e4m3, share, "{row}");
        assert_eq!(row["flops_e2m1"].as_u64(), Some(if format == "W4A4" { all } else { 0 }), "{row}");
    }

    let run = sandbox.run(["bench", "--kernels=attention", "--quick", "--json", "-q", "--precision", "f32"]).good();
    let [report] = &run.json()[..] else { panic!("{}", run.text()) };
    let rows = report["rows"].as_array().unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["op"].as_str().unwrap().starts_with("attention")), "{report}");
    assert_eq!((report["precision"].as_str(), run.stderr.as_str()), (Some("f32"), ""));
    assert!(rows.iter().all(|row| row["format"] == "f32"), "{report}");
    assert_eq!(sandbox.names(), ["kernels.json"]);
}

/// The first SIGINT ends the run, and no file is written.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_it() {
    use std::io::{BufRead, BufReader};
    let sandbox = Sandbox::new();
    let mut child = sandbox.command(["bench", "--runs", "1000"].iter().chain(&QUICK)).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(stderr.any(|line| line.unwrap().starts_with("warm image 1 of 1000")));
    send("-INT", &child);
    assert_eq!(stderr.last().unwrap().unwrap(), "error: interrupted");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(130), &b""[..]));
    assert!(sandbox.names().is_empty());
}

/// Tag, class and text.
type Element = (String, String, String);

/// The elements of an SVG in order, after a check that it is well-formed.
fn elements(svg: &str) -> Vec<Element> {
    let (mut found, mut open, mut rest) = (Vec::<Element>::new(), Vec::<usize>::new(), svg);
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("a tag that does not end");
        let (text, tag) = (&rest[..start], &rest[start + 1..end]);
        assert!(!text.contains('>') || open.last().is_some_and(|i| found[*i].0 == "style"), "{text}");
        if let Some(i) = open.last() {
            found[*i].2.push_str(text);
        }
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop().map(|i| found[i].0.as_str()), Some(name)),
            None => {
                assert!(!tag.contains('<') && tag.matches('"').count() % 2 == 0, "{tag}");
                let class = tag.split_once("class=\"").map_or("", |(_, class)| class.split('"').next().unwrap());
                found.push((tag.split([' ', '/']).next().unwrap().into(), class.into(), String::new()));
                if !tag.ends_with('/') {
                    open.push(found.len() - 1);
                }
            }
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    let entity = |text: &str| ["amp;", "lt;", "gt;", "quot;", "#39;"].iter().any(|known| text.starts_with(known));
    assert!(svg.split('&').skip(1).all(entity), "an ampersand that is not escaped");
    found
}

fn texts(elements: &[Element]) -> Vec<&str> {
    elements.iter().filter(|(tag, ..)| tag == "text").map(|(_, _, text)| text.as_str()).collect()
}

#[test]
fn images_are_drawn_stage_by_stage() {
    let sandbox = Sandbox::new();
    let run = sandbox.quick(&["bench", "--runs", "3", "--svg", "own.svg", "--json=own.json"]);
    assert!(run.text().contains("\ntotal "), "the table is printed as well: {}", run.text());
    let drawn = std::fs::read_to_string(sandbox.path("own.svg")).unwrap();
    let found = elements(&drawn);
    assert!(texts(&found).contains(&"median of 3") && drawn.contains("prefers-color-scheme:dark"), "{drawn}");
    // Recorded results give the same chart.
    let run = sandbox.run(["bench", "--from", "own.json", "--svg", "again.svg"]).good();
    assert_eq!((run.text(), run.stderr.as_str()), ("again.svg\n", ""));
    assert_eq!(std::fs::read_to_string(sandbox.path("again.svg")).unwrap(), drawn);

    // The chart of the documentation matches its recorded figures.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let [own, others] = ["kiln", "diffusers"].map(|engine| {
        let file = format!("bench/results/2026-11-17-h200/images/{engine}-1024x1024-burst.json");
        root.join(file).to_str().unwrap().to_owned()
    });
    sandbox.run(["bench", "--from", &own, "--compare", &others, "--svg", "docs.svg"]).good();
    let kept = std::fs::read_to_string(root.join("docs/images/stages-1024.svg")).unwrap();
    assert!(std::fs::read_to_string(sandbox.path("docs.svg")).unwrap() == kept, "docs/performance.md says how it is drawn");

    // Known figures: a stage that took no time has neither a piece nor an entry of the legend.
    let times = |total: f64| serde_json::json!({"encode": 0.0, "denoise": 0.2, "decode": 0.05, "png": 0.00001, "total": total});
    let own = serde_json::json!({
        "kind": "images", "kiln": "9", "model": "m <&> \"q\" 'n'", "machine": "GPU 0 (X)", "precision": "bf16", "width": 64, "height": 64,
        "steps": 1, "cold_s": {"open": 0.5, "load": 1.0, "denoise": 0.4, "total": 2.0}, "warm_s": [times(0.3), times(0.5), times(0.26)],
    });
    let other = serde_json::json!({
        "kind": "beside", "machine": "X", "width": 64, "height": 64, "steps": 1,
        "engines": [{"name": "<script>&\u{1}", "images_s": [{"total": 0.6}]}, {"name": "none", "images_s": []}],
    });
    std::fs::write(sandbox.path("k.json"), own.to_string()).unwrap();
    std::fs::write(sandbox.path("o.json"), other.to_string()).unwrap();
    sandbox.run(["bench", "--from", "k.json", "--svg", "k.svg", "--compare", "o.json"]).good();
    let drawn = std::fs::read_to_string(sandbox.path("k.svg")).unwrap();
    let found = elements(&drawn);
    let rects: Vec<&str> = found.iter().filter(|(tag, ..)| tag == "rect").map(|(_, class, _)| class.as_str()).collect();
    let legend = ["open", "load", "denoise", "decode", "png", "rest"];
    // The PNG of ten microseconds is in the legend, but too narrow to be drawn.
    let bars = ["open", "load", "denoise", "rest", "denoise", "decode", "rest", "rest"];
    assert_eq!(rects, [&["page"][..], &legend, &bars].concat(), "{drawn}");
    let shown = texts(&found);
    for text in ["m &lt;&amp;&gt; &quot;q&quot; &#39;n&#39;, 64x64, 1 steps, bf16", "2,000 ms", "300 ms", "260 to 500", "600 ms"]
    {
        assert!(shown.contains(&text), "{text}: {shown:?}");
    }
    assert!(shown.contains(&"&lt;script&gt;&amp;\u{fffd}") && shown.contains(&"one image, 2.00 x kiln&#39;s"), "{shown:?}");

    // Other sizes, impossible results and other files are refused before anything is measured.
    for (change, message) in [
        (("width", Value::from(80)), "it has 80x64 in 1 steps, these are 64x64 in 1 steps"),
        (("engines", serde_json::json!([{"name": "x", "images_s": [{"total": -1.0}]}])), "impossible times or rates"),
        (("kind", "what".into()), "no benchmark results"),
    ] {
        let mut other = other.clone();
        other[change.0] = change.1;
        std::fs::write(sandbox.path("bad.json"), other.to_string()).unwrap();
        let run = sandbox.run(["bench", "--from", "k.json", "--svg", "bad.svg", "--compare", "bad.json"]);
        assert!(run.code == Some(3) && run.stderr.contains(message), "{message}: {}", run.stderr);
    }
    for (line, code, message) in [
        ("bench --svg own.svg", 5, "give another name"),
        ("bench --svg a.svg --json=a.svg", 2, "--json and --svg would be the same file"),
        ("bench --svg -", 2, "--svg writes a file"),
        ("bench --compare k.json", 2, "--svg"),
        ("bench --from k.json", 2, "--svg"),
        ("bench --from o.json --svg b.svg", 3, "which only --compare takes"),
    ] {
        let run = sandbox.run(line.split(' '));
        assert!(run.code == Some(code) && run.stderr.contains(message), "{line}: {}", run.stderr);
    }
    assert_eq!(sandbox.names().iter().filter(|name| name.ends_with(".svg")).count(), 4, "{:?}", sandbox.names());
}

#[test]
fn kernels_are_drawn_below_their_ceilings() {
    let sandbox = Sandbox::new();
    sandbox.run(["bench", "--kernels=norm", "--quick", "--svg", "cpu.svg", "-q"]).good();
    elements(&std::fs::read_to_string(sandbox.path("cpu.svg")).unwrap());
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/results/2026-11-15-h200/kernels.json");
    sandbox.run(["bench", "--from", recorded, "--svg", "gpu.svg"]).good();
    let found = elements(&std::fs::read_to_string(sandbox.path("gpu.svg")).unwrap());
    let report: Value = serde_json::from_slice(&std::fs::read(recorded).unwrap()).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let count = |tag: &str, class: &str| found.iter().filter(|(t, c, _)| t == tag && c == class).count();
    // A bar for each row, and one entry of the legend.
    let of = |key: &str| rows.iter().filter(|row| !row[key].is_null()).count();
    assert_eq!((count("rect", "copy"), count("rect", "peak")), (of("of_copy") + 1, of("of_tensor_cores") + 1));
    let multiply = rows.iter().filter(|row| row["flops"].as_u64() > Some(0)).count();
    assert_eq!(count("circle", "copy") + count("circle", "peak"), multiply);
    assert_eq!(count("polyline", "roof"), 2, "the bandwidth of memory and one peak");
    let shown = texts(&found);
    assert!(shown.contains(&"arithmetic intensity, FLOP per byte") && shown.contains(&"bf16 peak, 1070.5 TFLOP/s"), "{shown:?}");
}

/// Another program takes turns with kiln by asking for one image after the other.
#[test]
fn images_are_timed_on_request() {
    use std::io::Write;
    let sandbox = Sandbox::new();
    let flags = ["bench", "--on-request", "-q"];
    let ask = |requests: &[u8]| {
        let mut child = sandbox.command(flags.iter().chain(&QUICK)).stdin(std::process::Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(requests).unwrap();
        child.wait_with_output().unwrap()
    };
    let output = ask(b"3 a fox in the snow\n18446744073709551615 \n");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() == 3 && lines[0]["kind"] == "images", "{lines:?}");
    check_times(&lines[0]["cold_s"], &["open", "load"], 1);
    lines[1..].iter().for_each(|times| check_times(times, &[], 1));
    let kept = sandbox.run(["bench", "--keep", "--runs", "2", "--json", "-q"].iter().chain(&QUICK)).good();
    assert_eq!(serde_json::from_str::<Value>(kept.text()).unwrap()["warm_s"].as_array().unwrap().len(), 2);
    for (request, message) in [(&b"a fox"[..], "does not begin with a seed"), (b"3", "has no prompt"), (b"3 \xff", "not UTF-8")] {
        let output = ask(request);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.contains(message), "{stderr}");
    }
    assert!(sandbox.names().is_empty());
}
