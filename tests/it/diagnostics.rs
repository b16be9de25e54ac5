//! The compiler's messages for mistakes that are easily made with the layer.

use std::path::Path;
use std::process::Command;

/// A program with this in its `main`.
fn program(body: &str) -> String {
    format!(
        "#![allow(unused)]
         use http::request::Parts;
         use tower_semaphore::limit::{{ExtensionKey, HeaderKey, Refusal}};
         use tower_semaphore::{{ConcurrencyLimitLayer, Semaphore}};
         struct Plan;
         fn main() {{
             let semaphore = Semaphore::in_memory();
             let builder = ConcurrencyLimitLayer::builder(&semaphore, \"api\").limit(1);
             {body}
         }}"
    )
}

/// Mistakes, and what the compiler's message must contain.
const MISTAKES: [(&str, &str, &[&str]); 7] = [
    (
        "key_of_a_string",
        "builder.key(\"x-tenant\");",
        &["does not extract the key of a request", "`|parts: &Parts| ...`"],
    ),
    (
        "key_of_the_request",
        "builder.key(|request: &http::Request<()>| Some(String::new()));",
        &["http::request::Parts", "KeyExtractor"],
    ),
    (
        "key_of_an_extension",
        "builder.key(ExtensionKey::<Plan>::new());",
        &["Plan", "`ExtensionKey<T>` is one if `T: AsRef<[u8]> + Send + Sync + 'static`"],
    ),
    (
        "refusal_of_a_string",
        "builder.refusal(\"busy\");",
        &["does not make the response to a rejected request", "`|refusal: &Refusal| ...`"],
    ),
    (
        "refusal_of_a_number",
        "builder.refusal(|_: &Refusal| 503);",
        &["is not a response to a rejected request", "`axum`"],
    ),
    (
        // With the feature `axum`, a type that is `IntoResponse` as well would have it twice.
        "refusal_of_ones_own",
        "impl tower_semaphore::limit::IntoRefusalResponse for Plan {
             fn into_refusal_response(self) -> http::Response<tower_semaphore::limit::RefusalBody> {
                 http::Response::new(String::new().into())
             }
         }",
        &["`Plan` cannot be made an `IntoRefusalResponse`", "`axum::response::IntoResponse`"],
    ),
    (
        "not_built",
        "axum::Router::<()>::new().layer(builder);",
        &["ConcurrencyLimitBuilder", "`build()`"],
    ),
];

#[test]
fn the_compiler_says_what_is_missing() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let bins = dir.path().join("src/bin");
    std::fs::create_dir_all(&bins).unwrap();
    std::fs::copy(root.join("Cargo.lock"), dir.path().join("Cargo.lock")).unwrap();
    let manifest = format!(
        "[package]\nname = \"mistakes\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n\
         axum = {{ version = \"0.8\", default-features = false }}\nhttp = \"1\"\n\
         tower-semaphore = {{ path = {root:?}, default-features = false }}\n"
    );
    std::fs::write(dir.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::write(bins.join("none.rs"), program("builder.build().unwrap();")).unwrap();
    for (name, body, _) in MISTAKES {
        std::fs::write(bins.join(name).with_extension("rs"), program(body)).unwrap();
    }
    let check = |bin: &str| {
        let output = Command::new(env!("CARGO"))
            .args(["check", "--offline", "--quiet", "--bin", bin])
            .current_dir(dir.path())
            .env("CARGO_TARGET_DIR", root.join("target/diagnostics"))
            .env("CARGO_TERM_COLOR", "never")
            .output()
            .expect("cargo");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (is_right, said) = check("none");
    assert!(is_right, "{said}");
    for (name, _, expected) in MISTAKES {
        let (is_right, said) = check(name);
        assert!(!is_right, "{name} compiles");
        for text in expected {
            assert!(said.contains(text), "{name}: {text:?} is not in\n{said}");
        }
    }
}
