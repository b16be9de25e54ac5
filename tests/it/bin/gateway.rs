//! The gateway, as a program of this package: cargo builds it before the tests, and tells them where it is.

use std::process::ExitCode;

fn main() -> ExitCode {
    semaphore_gateway::main()
}
