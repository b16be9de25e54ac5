//! URLs that are read, and that are rejected.

use proptest::prelude::*;

use super::{Servers, Url};

fn error(url: &str) -> String {
    Url::parse(url).err().unwrap_or_else(|| panic!("{url} was taken")).to_string()
}

#[test]
fn sentinels_are_read() {
    for plus in ["redis-sentinel", "redis+sentinel"] {
        let url = format!(
            "{plus}://app:p%40w@h1,h2:1,[::1]:2/my-master/3?sentinel_username=s&sentinel_password=x%2F"
        );
        let Ok(Servers::Sentinel { sentinels, master, server }) =
            Url::parse(&url).map(|url| url.servers)
        else {
            panic!("{url}")
        };
        assert_eq!(master, "my-master");
        let addresses: Vec<_> = sentinels.iter().map(|one| one.addr().to_string()).collect();
        assert_eq!(addresses, ["h1:26379", "h2:1", "::1:2"]);
        let (of_one, of_all) = (sentinels[2].redis_settings(), server.redis_settings());
        assert_eq!((of_one.username(), of_one.password()), (Some("s"), Some("x/")));
        assert_eq!((of_all.username(), of_all.password()), (Some("app"), Some("p@w")));
        assert_eq!((of_one.db(), of_all.db()), (0, 3));
    }
}

#[test]
fn nodes_of_a_cluster_are_read() {
    let url = Url::parse("redis-cluster://:pw@h1:7000,h2/0");
    let Ok(Servers::Cluster(nodes)) = url.map(|url| url.servers) else { panic!("not read") };
    let addresses: Vec<_> = nodes.iter().map(|one| one.addr().to_string()).collect();
    assert_eq!(addresses, ["h1:7000", "h2:6379"]);
    assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("pw")));
}

#[test]
fn what_is_wrong_is_named() {
    for (url, named) in [
        ("localhost:6379", "`://`"),
        ("http://h/", "\"http\""),
        ("redis://h:0", "host 1: its port 0 is not a number from 1 to 65535"),
        ("redis://u:p@h:70000/", "host 1: its port 70000 is not a number from 1 to 65535"),
        ("redis://h:port/", "host 1: its port is not a number from 1 to 65535"),
        ("redis://h/-1", "the database -1 is not a number from 0 to 2147483647"),
        ("redis://h/+1", "the database is not a number from 0 to 2147483647"),
        ("redis://h/jobs", "the database is not a number from 0 to 2147483647"),
        ("redis://h/0/1", "the database is not a number from 0 to 2147483647"),
        ("redis://h1,h2", "redis-cluster://"),
        ("redis://", "host 1: its name is missing"),
        ("redis://h?timeout=3", "option 1 is not known; known here: protocol;"),
        ("redis://h?protocol=resp2", "protocol is not `resp3`"),
        ("redis://h#insecure", "a # must be"),
        ("redis://:%ff@h", "not valid UTF-8"),
        ("redis://h\t/", "control character"),
        ("redis+unix://socket", "not absolute"),
        ("redis+unix:///socket?db=x", "the database is not"),
        ("redis+unix:///socket?pass=a&b", "option 2 is not known; known here: db, user, pass"),
        ("redis-cluster://u:a@h1,u:a@h2", "must be percent-encoded in"),
        ("redis-sentinel://h1:26379", "name of a master"),
        ("redis-sentinel://h1/a b", "name of a master"),
        ("redis-sentinel://h1:x/m", "host 1: its port is not"),
        ("redis-sentinel://h1:0/m", "host 1: its port 0 is not"),
        ("redis-sentinel://h1,h2:70000/m", "host 2: its port 70000 is not"),
        ("redis-sentinel://h1,,h2/m", "host 2: its name is missing"),
        ("redis-sentinel://h1,h_2,h!3/m", "host 3: it is neither a name nor an address"),
        ("redis-sentinel://[::g]:1/m", "host 1: it is neither a name nor an address"),
        ("redis-sentinel://h1/m/x", "the database is not"),
        ("redis-sentinel://h1/m/0/y", "after the database"),
        ("redis-sentinel://h1/m?timeout=3", "option 1 is not known"),
        ("redis-sentinel://h1/m?sentinel_tls=no", "neither `true` nor `false`"),
        ("redis-sentinel://h1/m#x", "a # must be"),
        ("redis-cluster://", "host 1: its name is missing"),
        ("redis-cluster://h1:7000/3", "only database 0, but the URL has 3"),
        ("redis-cluster://h1:7000?x=1", "options"),
    ] {
        let error = error(url);
        assert!(error.contains(named), "{url}: {error}");
    }
}

#[test]
fn what_can_be_used_is() {
    for url in [
        "redis://user:pa:ss@host",
        "redis://user:p@s,s@host",
        "redis://localhost/0?protocol=resp3\n",
        "redis://host:65535/2147483647",
        "valkey://[::1]",
        "redis+unix:///tmp/a.sock?db=1&user=u&pass=a%26b",
    ] {
        assert!(Url::parse(url).is_ok(), "{url}");
    }
}

#[cfg(not(feature = "tls-no-provider"))]
#[test]
fn tls_names_its_feature() {
    for url in [
        "rediss://h",
        "valkeys://h",
        "rediss-sentinel://h/m",
        "rediss-cluster://h",
        "redis-sentinel://h/m?sentinel_tls=true",
    ] {
        let error = error(url);
        assert!(error.contains("needs the feature `tls` of tower-semaphore"), "{url}: {error}");
    }
}

#[cfg(feature = "tls-no-provider")]
#[test]
fn sentinels_have_tls_as_the_servers_have_unless_told_otherwise() {
    let tls = |url: &str| Url::parse(url).map(|url| (url.tls, url.sentinel_tls)).unwrap();
    assert_eq!(tls("redis-sentinel://h/m"), (false, false));
    assert_eq!(tls("rediss-sentinel://h/m"), (true, true));
    assert_eq!(tls("redis-sentinel://h/m?sentinel_tls=true"), (false, true));
    assert_eq!(tls("rediss-sentinel://h/m?sentinel_tls=false"), (true, false));
    assert_eq!(tls("rediss-cluster://h"), (true, false));
    assert_eq!(tls("redis+unix:///h"), (false, false));
}

#[test]
fn no_piece_of_a_password_is_shown() {
    for url in [
        "redis-cluster://u:hunt/er2@h1",
        "redis-cluster://u:hunt,er2@h1:x",
        "redis-cluster://u:hunt@er2@h1",
        "redis-cluster://u:hunter2@h1:x",
        "redis-cluster://u:hunter2@h!",
        "redis-sentinel://u:hunt?er2@h1/m",
        "redis-sentinel://u:hunt#er2@h1/m",
        "redis-sentinel://h1/m?sentinel_password=hunt@er2",
        "redis-sentinel://h1/m?sentinel_password=hunt/er2",
        "redis-sentinel://u:hunter2@h1/m/9999999999",
        "redis-sentinel://h1/m?sentinel_password=hunt&er2",
        "redis-sentinel://h1/m?hunter2",
        "redis-cluster://u:hunt%40er2",
        "redis://u:hunt%40er2",
        "redis://u:hunter2",
        "redis://user:hunt:er2",
        "redis://u:hunt/er2@h1",
        "redis://u:1?hunter2@h1",
        "redis://u:1#hunter2@h1",
        "redis+unix:///socket?pass=a&hunter2",
        "hunter2://h1",
    ] {
        let error = error(url);
        assert!(!error.contains("hunt") && !error.contains("er2"), "{url}: {error}");
    }
}

/// A piece of a URL: a valid one, an invalid one, or one that cuts a URL in two.
fn piece() -> impl Strategy<Value = String> {
    const WORDS: &[&str] = &[
        "redis://",
        "rediss://",
        "redis-sentinel://",
        "redis-cluster://",
        "redis+unix://",
        "://",
        "/",
        ":",
        "@",
        ",",
        "?",
        "#",
        "&",
        "=",
        "%40",
        "%2F",
        "%zz",
        "%",
        "[",
        "]",
        " ",
        "\n",
        "h1",
        "user",
        "6379",
        "70000",
        "0",
        "/0",
        "/m",
        "?pass=",
        "?db=",
        "?protocol=",
        "?sentinel_password=",
        "&sentinel_username=",
        "&sentinel_tls=",
        "[::1]",
    ];
    prop_oneof![
        4 => prop::sample::select(WORDS).prop_map(str::to_owned),
        1 => "[a-z0-9.%é]{0,4}",
    ]
}

/// A URL with all of its parts, some of which are then replaced or removed.
fn url() -> impl Strategy<Value = Vec<String>> {
    let shapes = prop::sample::select(
        &[
            "redis:// user : pw @ h1 : 6379 / 0 ? protocol = resp3",
            "rediss:// user : pw @ h1",
            "redis+unix:// /socket ? db = 0 & user = user & pass = pw",
            "redis-sentinel:// user : pw @ h1 : 1 , h2 / master / 0 ? sentinel_username = u & \
         sentinel_password = pw & sentinel_tls = false",
            "redis-cluster:// user : pw @ h1 : 7000 , h2 / 0",
        ][..],
    );
    let change = (any::<prop::sample::Index>(), prop::option::of(piece()));
    let changes = prop::collection::vec(change, 0..4);
    let whole = (shapes, changes).prop_map(|(shape, changes)| {
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
        let builder = crate::backend::RedisBackend::builder(&*url);
        let mut shown = format!("{builder:?}");
        match builder.build() {
            Ok(backend) => shown += &format!("{backend:?}"),
            Err(error) => {
                let mut error: Option<&dyn std::error::Error> = Some(&error);
                while let Some(one) = error {
                    shown += &format!("{one} {one:?} {one:#?}");
                    error = one.source();
                }
            }
        }
        for part in secret.split("%40") {
            prop_assert!(!shown.contains(part), "{}: {}", url, shown);
        }
    }
}
