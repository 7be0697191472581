//! Shell completions and man pages: whatever `--help` knows occurs in them, and a shell can read them.

use clap::CommandFactory;
use common::sandbox::Sandbox;
use kiln_program::cli::Cli;
use std::process::Command;

/// Every command with its long flags.
fn commands() -> Vec<(String, Vec<String>)> {
    let kiln = Cli::command();
    let flags = |command: &clap::Command| command.get_arguments().filter_map(|arg| arg.get_long()).map(String::from).collect();
    kiln.get_subcommands().map(|command| (command.get_name().to_owned(), flags(command))).collect()
}

#[test]
fn completions_know_every_command_and_flag() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = sandbox.run(["completions", shell]).good();
        assert!(run.stderr.is_empty(), "{shell}: {}", run.stderr);
        for (command, flags) in commands() {
            assert!(run.text().contains(&command), "{shell}: {command}");
            for flag in flags {
                // fish writes `-l seed`, the others `--seed`.
                let (dashes, fish) = (format!("--{flag}"), format!("-l {flag}"));
                assert!(run.text().contains(&dashes) || run.text().contains(&fish), "{shell}: {command} --{flag}");
            }
        }
        // The scripts of the other two complete no values.
        if ["bash", "zsh", "fish"].contains(&shell) {
            for value in ["torch-cpu-legacy", "distilled", "bf16"] {
                assert!(run.text().contains(value), "{shell}: {value}");
            }
        }
    }
    assert_eq!(sandbox.run(["completions", "sh"]).code, Some(2));
    assert_eq!(sandbox.run(["completions"]).code, Some(2));
}

#[cfg(unix)]
#[test]
fn bash_can_read_its_completions_and_completes_with_them() {
    let sandbox = Sandbox::new();
    let script = sandbox.path("kiln.bash");
    std::fs::write(&script, sandbox.run(["completions", "bash"]).good().stdout).unwrap();
    let checked = Command::new("bash").arg("-n").arg(&script).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    // The words typed so far, the last of them to be completed, and what has to be among the proposals.
    for (words, want) in [
        ("kiln ben", "bench"),
        ("kiln --noise-k", "--noise-kind"),
        ("kiln bench --kern", "--kernels"),
        ("kiln --noise-kind torch-cpu-l", "torch-cpu-legacy"),
        ("kiln man pl", "plan"),
    ] {
        let list: Vec<&str> = words.split(' ').collect();
        let (last, before) = (list.len() - 1, list[list.len() - 2]);
        let code = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={last}; _kiln kiln {} {before}; echo \"${{COMPREPLY[@]}}\"",
            script.display(),
            list[last]
        );
        let run = Command::new("bash").args(["--norc", "-c", &code]).output().unwrap();
        let proposals = String::from_utf8(run.stdout).unwrap();
        assert!(proposals.split_whitespace().any(|word| word == want), "{words}: {proposals:?}");
    }
}

#[test]
fn man_pages_describe_every_flag() {
    let sandbox = Sandbox::new();
    let page = |args: &[&str]| sandbox.run([&["man"], args].concat()).good().text().to_owned();
    let kiln = page(&[]);
    assert!(kiln.contains(".TH kiln 1 "), "{kiln}");
    for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "INPUT", "SAMPLING", "EXAMPLES", "MODELS"] {
        assert!(kiln.contains(&format!("\n.SH {section}\n")), "{section}: {kiln}");
    }
    assert!(kiln.contains("\n.SH \"EXIT CODES\"\n"), "{kiln}");
    for (command, flags) in commands() {
        // Hyphens are escaped, so that they are not typeset as dashes.
        assert!(kiln.contains(&format!("kiln\\-{command}(1)")), "{command}: {kiln}");
        let text = page(&[&command]);
        assert!(text.contains(&format!(".TH kiln-{command} 1 ")), "{text}");
        for flag in flags {
            assert!(text.contains(&format!("\\-\\-{}", flag.replace('-', "\\-"))), "{command} --{flag}: {text}");
        }
    }
    assert_eq!(sandbox.run(["man", "fox"]).code, Some(2));
    let list = page(&["--list"]);
    assert!(commands().iter().all(|(command, _)| list.lines().any(|line| line == command)), "{list}");
    assert!(list.lines().any(|line| line == "lora-inspect") && page(&["lora-inspect"]).contains(".TH kiln-lora-inspect 1 "));
}
