//! URLs that are read, and that are rejected.

use proptest::prelude::*;

use super::Url;

fn error(url: &str) -> String {
    Url::parse(url).err().unwrap_or_else(|| panic!("{url} was taken")).to_string()
}

fn addresses(url: &Url) -> Vec<String> {
    url.endpoints.iter().map(ToString::to_string).collect()
}

#[test]
fn all_parts_are_read() {
    let url = Url::parse("etcd://app:p%40:w%2F@h1,H-2.internal:1,[::1]:2,10.0.0.1/shop\n").unwrap();
    assert_eq!(addresses(&url), ["h1:2379", "H-2.internal:1", "[::1]:2", "10.0.0.1:2379"]);
    let hosts: Vec<_> = url.endpoints.iter().map(|one| (one.host(), one.port())).collect();
    assert_eq!(hosts, [("h1", 2379), ("H-2.internal", 1), ("::1", 2), ("10.0.0.1", 2379)]);
    let credentials = url.credentials.unwrap();
    assert_eq!((&*credentials.user, &*credentials.password), ("app", "p@:w/"));
    assert_eq!((url.prefix.as_deref(), url.is_tls), (Some("shop"), false));
}

#[test]
fn most_parts_may_be_left_out() {
    for text in ["etcd://[::1]", "etcd://[::1]:2379/", " etcd://[::1]:2379 "] {
        let url = Url::parse(text).unwrap();
        assert_eq!(addresses(&url), ["[::1]:2379"], "{text}");
        assert!(url.credentials.is_none() && url.prefix.is_none(), "{text}");
    }
}

#[cfg(feature = "tls-no-provider")]
#[test]
fn a_scheme_of_its_own_stands_for_tls() {
    assert!(Url::parse("etcds://h").unwrap().is_tls);
}

#[cfg(not(feature = "tls-no-provider"))]
#[test]
fn tls_names_its_feature() {
    let error = error("etcds://h");
    assert!(error.contains("needs the feature `tls` of tower-semaphore"), "{error}");
}

#[test]
fn what_is_wrong_is_named() {
    for (url, named) in [
        ("localhost:2379", "`://` is missing"),
        ("http://h:2379", "the scheme \"http\" is not known"),
        ("etcd3://h", "its scheme is not known"),
        ("etcd://", "host 1: its name is missing"),
        ("etcd://h1,,h2", "host 2: its name is missing"),
        ("etcd://h1,h2:70000", "host 2: its port 70000 is not a number from 1 to 65535"),
        ("etcd://h:0", "host 1: its port 0 is not a number from 1 to 65535"),
        ("etcd://h:", "host 1: its port is not a number from 1 to 65535"),
        ("etcd://h!", "host 1: it is neither a name nor an address"),
        ("etcd://::1", "host 1: it is neither a name nor an address"),
        ("etcd://[::g]", "host 1: it is neither a name nor an address"),
        ("etcd://h1,h2,h1:2379", "host 3 is host 1 once more"),
        ("etcd://h1:1,H1:1", "host 2 is host 1 once more"),
        ("etcd://[::1],[0:0::1]", "host 2 is host 1 once more"),
        ("etcd://u@h", "the user or its password is missing"),
        ("etcd://:p@h", "the user or its password is missing"),
        ("etcd://u:@h", "the user or its password is missing"),
        ("etcd://@h", "the user or its password is missing"),
        ("etcd://u:%ff@h", "not valid UTF-8"),
        ("etcd://u:a@h1,u:a@h2", "must be percent-encoded in"),
        ("etcd://h?prefix=x", "it has options"),
        ("etcd://h/a/b", "the prefix is invalid; expected 1 to 40 of"),
        ("etcd://h/a%2Fb", "the prefix is invalid"),
        ("etcd://h#x", "a # must be"),
        ("etcd://h\t/", "control character"),
    ] {
        let error = error(url);
        assert!(error.contains(named), "{url}: {error}");
        assert!(error.contains("expected etcd://[user:password@]host"), "{url}: {error}");
    }
}

#[test]
fn no_piece_of_a_password_is_shown() {
    for url in [
        "etcd://u:hunt/er2@h1",
        "etcd://u:hunt,er2@h1:x",
        "etcd://u:hunt@er2@h1",
        "etcd://u:hunt?er2@h1",
        "etcd://u:hunt#er2@h1",
        "etcd://u:hunter2@h!",
        "etcd://hunter2@h1",
        "etcd://u:hunter2",
        "etcd://u:1/hunter2@h1",
        "etcd://h1/hunter2!",
        "etcd://h1?hunter2",
        "hunter2://h1",
    ] {
        let error = error(url);
        assert!(!error.contains("hunt") && !error.contains("er2"), "{url}: {error}");
    }
}

/// A piece of a URL: a valid one, an invalid one, or one that cuts a URL in two.
fn piece() -> impl Strategy<Value = String> {
    const WORDS: &[&str] = &[
        "etcd://", "etcds://", "://", "/", ":", "@", ",", "?", "#", "%40", "%zz", "%", "[", "]",
        " ", "\n", "h1", "user", "2379", "70000", "0", "/shop", "[::1]",
    ];
    prop_oneof![
        4 => prop::sample::select(WORDS).prop_map(str::to_owned),
        1 => "[a-z0-9.%é]{0,4}",
    ]
}

/// A URL with all of its parts, some of which are then replaced or removed.
fn url() -> impl Strategy<Value = Vec<String>> {
    let change = (any::<prop::sample::Index>(), prop::option::of(piece()));
    let whole = prop::collection::vec(change, 0..4).prop_map(|changes| {
        let shape = "etcd:// user : pw @ h1 : 2379 , [::1] / shop";
        let mut pieces: Vec<_> = shape.split_whitespace().map(str::to_owned).collect();
        for (at, piece) in changes {
            let at = at.index(pieces.len());
            pieces[at] = piece.unwrap_or_default();
        }
        pieces
    });
    prop_oneof![2 => whole, 1 => prop::collection::vec(piece(), 1..12)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// Wherever a secret stands, alone or between other pieces.
    #[test]
    fn a_secret_is_shown_in_no_place_of_a_url(
        mut pieces in url(),
        at in any::<prop::sample::Index>(),
        replaces in any::<bool>(),
        secret in prop::sample::select(&["hunter2", "HUNTER", "sk-x_y.z", "hunt%40er2", "31337001"][..]),
    ) {
        let at = at.index(pieces.len());
        if replaces {
            pieces[at] = secret.to_owned();
        } else {
            pieces.insert(at, secret.to_owned());
        }
        let url = pieces.concat();
        let shown = match Url::parse(&url) {
            Ok(url) => format!("{url:?} {url:#?} {:?}", url.credentials),
            Err(error) => format!("{error} {error:?} {error:#?}"),
        };
        for part in secret.split("%40") {
            prop_assert!(!shown.contains(part), "{}: {}", url, shown);
        }
    }
}
