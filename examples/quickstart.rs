//! Soon.

fn main() {}
