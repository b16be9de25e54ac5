//! The files of docs/deploy contain what the gateway understands: each of their command lines starts a real gateway on
//! a real Redis, it answers each probe, and each grace period is longer than what it waits for.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Stdio};

use http::StatusCode;
use serde::Deserialize;
use serde_yaml_ng::{Deserializer, Value};

use crate::support::eventually;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::redis::{TestRedis, free_port};

const COMPOSE: &str = include_str!("../../docs/deploy/compose.yaml");
const KUBERNETES: &str = include_str!("../../docs/deploy/kubernetes.yaml");
const GATEWAY: &str = include_str!("../../docs/gateway.md");
const CONTAINERFILE: &str = include_str!("../../docs/deploy/Containerfile");
const IMAGE_USER: &str = "65534:65534";

fn strings(value: &Value) -> Vec<String> {
    let words = value.as_sequence().unwrap_or_else(|| panic!("no list: {value:?}"));
    words.iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// Returns the list of an instruction of the image.
fn instruction(name: &str) -> Vec<String> {
    let mut lines = CONTAINERFILE.lines().filter_map(|line| line.strip_prefix(name));
    serde_json::from_str(lines.next().unwrap_or_else(|| panic!("no {name}")).trim()).unwrap()
}

/// A command line in the form `--flag value`.
struct CommandLine(Vec<String>);

impl CommandLine {
    /// The command line of a container: the image's entrypoint, and the arguments instead of its own.
    fn of(args: &[String]) -> Self {
        assert_eq!(instruction("ENTRYPOINT"), ["/usr/local/bin/semaphore-gateway"]);
        let split = |arg: &String| match arg.split_once('=') {
            Some((flag, value)) => vec![flag.to_owned(), value.to_owned()],
            None => vec![arg.clone()],
        };
        Self(args.iter().flat_map(split).collect())
    }

    fn get(&self, flag: &str) -> &str {
        let at = self.0.iter().position(|arg| arg == flag);
        &self.0[at.unwrap_or_else(|| panic!("no {flag} in {:?}", self.0)) + 1]
    }

    fn port(&self, flag: &str) -> u64 {
        self.get(flag).rsplit(':').next().unwrap().trim_end_matches('/').parse().unwrap()
    }

    fn seconds(&self, flag: &str) -> u64 {
        seconds(self.get(flag))
    }

    /// Starts it, with addresses of this machine.
    fn start(&self, redis: &TestRedis, upstream: &Upstream) -> (Gateway, u16) {
        let status = free_port();
        let own = HashMap::from([
            ("--listen", "127.0.0.1:0".to_owned()),
            ("--status", format!("127.0.0.1:{status}")),
            ("--redis", redis.url()),
            ("--upstream", upstream.url()),
        ]);
        let mut args = self.0.clone();
        let mut command = Gateway::command();
        for (flag, value) in own {
            if flag == "--redis" && !args.iter().any(|arg| arg == flag) {
                command.env("REDIS_URL", value);
                continue;
            }
            let at = args.iter().position(|arg| arg == flag);
            let at = at.unwrap_or_else(|| panic!("no {flag}: {args:?}"));
            args[at + 1] = value;
        }
        let process = command.args(&args).spawn().unwrap();
        (Gateway::running(process), status)
    }
}

/// The KiB that requests and connections take according to docs/gateway.md, and an eighth more, fit into a limit in
/// MiB.
fn fits(line: &CommandLine, limit: u64) {
    let (_, sum) = GATEWAY.split_once("\n    26 MiB + max-requests · 333 KiB + ").unwrap();
    assert!(sum.starts_with("max-connections · 113 KiB\n"), "{sum}");
    let count = |flag| line.get(flag).parse::<u64>().unwrap();
    let most = 26 * 1024 + count("--max-requests") * 333 + count("--max-connections") * 113;
    assert!(most * 9 / 8 <= limit * 1024, "{most} KiB of {limit} MiB");
    assert!(count("--max-queue") < count("--max-requests"), "one tenant leaves no room");
}

fn seconds(time: &str) -> u64 {
    time.strip_suffix('s').unwrap_or(time).parse().unwrap_or_else(|_| panic!("not in s: {time}"))
}

/// A tenant has as many permits as the command line says, in both of these gateways together.
async fn share_their_limit(redis: &TestRedis, lines: &[CommandLine]) -> Vec<(Gateway, u16)> {
    let upstream = Upstream::start().await;
    let gateways: Vec<_> = lines.iter().map(|line| line.start(redis, &upstream)).collect();
    let limit: usize = lines[0].get("--limit").parse().unwrap();
    let (client, wait) = (Client::new(), lines[0].seconds("--wait") * 1000);
    let requests = (0..=limit).map(|i| {
        let url = format!("{}/?ms={}", gateways[i % gateways.len()].0.url(), 2 * wait);
        let request = http::Request::get(url).header("x-tenant", "acme");
        let client = client.clone();
        tokio::spawn(async move { client.send(request).await.0 })
    });
    let mut served = 0;
    for request in requests.collect::<Vec<_>>() {
        match request.await.unwrap() {
            StatusCode::OK => served += 1,
            status => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
        }
    }
    assert_eq!(served, limit);
    gateways
}

#[tokio::test]
async fn the_compose_file_starts_gateways_that_share_their_limit() {
    let mut file: Value = serde_yaml_ng::from_str(COMPOSE).unwrap();
    file.apply_merge().unwrap();
    let services = file["services"].as_mapping().unwrap();
    let service = |name: &str| services.get(name).unwrap_or_else(|| panic!("no service {name}"));

    for (name, one) in services {
        assert_eq!(one["read_only"], true, "{name:?}");
        assert_eq!(strings(&one["cap_drop"]), ["ALL"], "{name:?}");
        assert_eq!(strings(&one["security_opt"]), ["no-new-privileges:true"], "{name:?}");
        let user =
            if one["image"] == "gateway" { IMAGE_USER } else { one["user"].as_str().unwrap() };
        assert!(!user.starts_with("root") && !user.starts_with('0'), "{name:?} is {user}");
        // Redis has no password and no TLS here, so only the gateways reach it.
        let networks = &one["networks"];
        let reaches_redis = !networks.is_null() && strings(networks).iter().any(|of| of == "redis");
        assert_eq!(reaches_redis, name == "redis" || one["image"] == "gateway", "{name:?}");
    }
    assert!(CONTAINERFILE.contains(&format!("\nUSER {IMAGE_USER}\n")));
    assert_eq!(strings(&service("redis")["networks"]), ["redis"]);
    assert_eq!(file["networks"]["redis"]["internal"], true);

    let server = strings(&service("redis")["command"]);
    assert_eq!(server[0], "redis-server");
    let args: Vec<_> = server[1..].iter().map(String::as_str).collect();
    let redis = TestRedis::start_with(&args);

    let mut lines = Vec::new();
    for (name, gateway) in services.iter().filter(|(_, one)| one["image"] == "gateway") {
        let line = CommandLine::of(&strings(&gateway["command"]));
        assert!(seconds(gateway["stop_grace_period"].as_str().unwrap()) > line.seconds("--drain"));
        assert_eq!(gateway["build"]["dockerfile"], "docs/deploy/Containerfile", "{name:?}");
        let limit = gateway["mem_limit"].as_str().unwrap().strip_suffix('m').unwrap();
        fits(&line, limit.parse().unwrap());
        let needs = &gateway["depends_on"];
        assert_eq!(needs["redis"]["condition"], "service_healthy", "{name:?}");
        assert!(!service("redis")["healthcheck"].is_null());
        assert_eq!(line.get("--redis"), "redis://redis/");
        for port in strings(&gateway["ports"]) {
            let inside: u64 = port.rsplit(':').next().unwrap().parse().unwrap();
            assert_eq!(inside, line.port("--listen"));
        }
        let (host, port) = line.get("--upstream")[7..].split_once(':').unwrap();
        assert_eq!(service(host)["environment"]["WHOAMI_PORT_NUMBER"], port, "{name:?}");
        assert_eq!(needs[host]["condition"], "service_started", "{name:?} is not stopped first");
        lines.push((gateway, line));
    }
    let (gateways, lines): (Vec<_>, Vec<_>) = lines.into_iter().unzip();
    assert_eq!(gateways.len(), 2);
    let running = share_their_limit(&redis, &lines).await;

    // Its health check passes while it is ready, and fails afterwards.
    let check = strings(&gateways[0]["healthcheck"]["test"]);
    let (gateway, status) = running.into_iter().next().unwrap();
    let passes = || {
        let port = lines[0].port("--status").to_string();
        assert!(check.iter().any(|arg| arg.contains(&port)), "{check:?}");
        // The file writes `$` as `$$`.
        let args =
            check.iter().map(|arg| arg.replace("$$", "$").replace(&port, &status.to_string()));
        let args: Vec<_> = args.collect();
        assert_eq!(args[0], "CMD");
        let mut check = Command::new(&args[1]);
        check.args(&args[2..]).stderr(Stdio::null()).status().unwrap().success()
    };
    assert!(passes());
    drop(redis);
    until_not_ready(status).await;
    assert!(!passes());
    drop(gateway);
    assert!(!passes());
}

/// Waits until a gateway that lost its Redis reports that.
async fn until_not_ready(status: u16) {
    let client = Client::new();
    let ready = format!("http://127.0.0.1:{status}/-/ready");
    eventually("it is not ready", async || client.get(&ready).await != StatusCode::OK).await;
}

#[tokio::test]
async fn the_kubernetes_manifest_fits_the_gateway() {
    let documents = Deserializer::from_str(KUBERNETES).map(|one| Value::deserialize(one).unwrap());
    let documents: HashMap<String, Value> =
        documents.map(|one| (one["kind"].as_str().unwrap().to_owned(), one)).collect();
    let (service, deployment) = (&documents["Service"]["spec"], &documents["Deployment"]["spec"]);
    let template = &deployment["template"];
    assert_eq!(deployment["selector"]["matchLabels"], template["metadata"]["labels"]);
    assert_eq!(service["selector"], template["metadata"]["labels"]);

    let pod = &template["spec"];
    let container = |name: &str| {
        let all = pod["containers"].as_sequence().unwrap();
        all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name}"))
    };
    let (app, gateway) = (container("app"), container("gateway"));
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    for rights in [&app["securityContext"], &gateway["securityContext"]] {
        assert_eq!(rights["allowPrivilegeEscalation"], false);
        assert_eq!(rights["readOnlyRootFilesystem"], true);
        assert_eq!(strings(&rights["capabilities"]["drop"]), ["ALL"]);
    }
    // The way to make the secret shows the password to nobody, and names TLS.
    let (said, _) = KUBERNETES.split_once("apiVersion").unwrap();
    assert!(said.contains(" rediss://") && !said.contains("--from-literal"), "{said}");
    let line = CommandLine::of(&strings(&gateway["args"]));

    let limit = gateway["resources"]["limits"]["memory"].as_str().unwrap();
    fits(&line, limit.strip_suffix("Mi").unwrap().parse().unwrap());
    // The URL of Redis has a password, and is in the environment alone.
    assert!(!line.0.iter().any(|arg| arg == "--redis" || arg.contains("$(")), "{:?}", line.0);
    assert_eq!(gateway["env"][0]["name"], "REDIS_URL");
    assert!(!gateway["env"][0]["valueFrom"]["secretKeyRef"].is_null());
    // The service stops after the gateway, and both before they are killed.
    let sleep = |of: &Value| of["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap();
    let gateway_ends = sleep(gateway) + line.seconds("--drain");
    assert!(sleep(app) >= gateway_ends, "the service ends before the gateway");
    let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace > gateway_ends && grace > sleep(app), "killed in the middle of it");
    // Ports are those of the command line, and named by their use.
    let port = |name: &Value| {
        let ports = gateway["ports"].as_sequence().unwrap();
        let port = ports.iter().find(|port| port["name"] == *name);
        port.unwrap_or_else(|| panic!("no port {name:?}"))["containerPort"].as_u64().unwrap()
    };
    assert_eq!(port(&service["ports"][0]["targetPort"]), line.port("--listen"));
    let annotations = &template["metadata"]["annotations"];
    assert_eq!(annotations["prometheus.io/port"], line.port("--status").to_string());

    let redis = TestRedis::start();
    let (_running, status) = share_their_limit(&redis, &[line]).await.remove(0);
    let client = Client::new();
    let mut paths = vec![annotations["prometheus.io/path"].as_str().unwrap()];
    for probe in ["livenessProbe", "readinessProbe"] {
        let get = &gateway[probe]["httpGet"];
        assert_eq!(port(&get["port"]), port(&"status".into()), "{probe}");
        paths.push(get["path"].as_str().unwrap());
    }
    for path in &paths {
        if cfg!(feature = "metrics") || !path.contains("metrics") {
            let url = format!("http://127.0.0.1:{status}{path}");
            assert_eq!(client.get(&url).await, StatusCode::OK, "{path}");
        }
    }
    drop(redis);
    until_not_ready(status).await;
    let alive = format!("http://127.0.0.1:{status}{}", paths[1]);
    assert_eq!(client.get(&alive).await, StatusCode::OK, "without Redis it is alive");
}

/// What a command line of the image has by default.
#[test]
fn the_image_listens_on_the_ports_that_it_exposes() {
    let line = CommandLine::of(&instruction("CMD"));
    let exposed = format!("\nEXPOSE {} {}\n", line.port("--listen"), line.port("--status"));
    assert!(CONTAINERFILE.contains(&exposed), "{exposed}");
}

/// The same commit gives the same image, and nothing that happens to be in the checkout gets into its build.
#[test]
fn the_image_is_built_from_what_is_committed() {
    let (_, install) = CONTAINERFILE.split_once("\nRUN cargo install ").unwrap();
    assert!(install.lines().next().unwrap().contains(" --locked "), "{install}");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let ignored = read(".gitignore");
    assert!(!ignored.lines().any(|line| line.trim_matches('/') == "Cargo.lock"), "{ignored}");
    let lock = read("Cargo.lock");
    let mut sources = lock.lines().filter_map(|line| line.strip_prefix("source = "));
    let other = sources
        .find(|source| *source != r#""registry+https://github.com/rust-lang/crates.io-index""#);
    assert_eq!(other, None);
    // What is let in is enough for the workspace, and all of it is committed but for what is named again below.
    let ignored = read(".dockerignore");
    let mut lines = ignored.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(lines.next(), Some("*"), "{ignored}");
    let let_in: Vec<_> = lines.clone().map_while(|line| line.strip_prefix('!')).collect();
    let left_out: Vec<_> = lines.skip(let_in.len()).collect();
    assert_eq!(left_out, ["**/target", "tests/.server", "tests/.tools"]);
    let copy = tempfile::tempdir().unwrap();
    let run = |program: &str, args: &[&str], at: &Path| {
        let output = Command::new(program).args(args).current_dir(at).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let files = run("git", &[&["ls-files", "--"], &let_in[..]].concat(), root);
    for file in files.lines().filter(|file| root.join(file).exists()) {
        let to = copy.path().join(file);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(root.join(file), to).unwrap();
    }
    let tree = ["tree", "--locked", "--offline", "--workspace", "--depth", "0"];
    run(env!("CARGO"), &tree, copy.path());
}

/// If this machine has the library, a gateway with the environment of the image uses it, and understands its settings.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_image_has_an_allocator_that_gives_memory_back() {
    use std::io::Read;

    assert!(CONTAINERFILE.contains(" libjemalloc2 "), "{CONTAINERFILE}");
    let set = CONTAINERFILE.lines().find_map(|line| line.strip_prefix("ENV ")).unwrap();
    let set: Vec<_> = set.split(' ').map(|one| one.split_once('=').unwrap()).collect();
    let upstream = Upstream::start().await;
    let mut command = Gateway::command();
    command.args(["--listen", "127.0.0.1:0", "--limit", "1", "--upstream", &upstream.url()]);
    let mut process = command.envs(set).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = process.stderr.take().unwrap();
    let gateway = Gateway::running(process);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", gateway.pid())).unwrap();
    drop(gateway);
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    if said.contains("object 'libjemalloc.so.2' from LD_PRELOAD cannot be preloaded") {
        println!("this machine has no libjemalloc.so.2");
        return;
    }
    assert!(maps.contains("/libjemalloc.so.2"), "{maps}");
    assert!(!said.contains("jemalloc"), "{said}");
}
