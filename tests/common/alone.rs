//! Runs tests in a process of their own. Such tests use something that exists only once in a process.

use std::process::Command;

/// Whether this process runs only this test. If not, starts a process that does, and fails if the test fails there.
pub fn alone<T>(_test: T) -> bool {
    const VARIABLE: &str = "KILN_TEST_ALONE";
    let (_, name) = std::any::type_name::<T>().split_once("::").unwrap();
    if std::env::var_os(VARIABLE).is_some_and(|value| value == name) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", "--nocapture", name]).env(VARIABLE, name).output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{stdout}{stderr}");
    assert!(output.status.success() && stdout.contains(" 1 passed;"), "{name} fails in a process of its own");
    false
}
