//! The program `semaphore-gateway`.

use std::process::ExitCode;

fn main() -> ExitCode {
    semaphore_gateway::main()
}
