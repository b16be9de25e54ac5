//! The dashboard and the alerts query only what is exposed: each query is compared with what a run on a real Redis,
//! with every outcome in it, shows to Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use metrics::set_default_local_recorder;
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use promql_parser::parser::{self, AggregateExpr, Expr, VectorSelector};
use promql_parser::util::{ExprVisitor, walk_expr};
use tokio_test::{assert_pending, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{HeaderKey, KeyLabels, MissingKey};
use tower_semaphore::metrics::BUCKETS;
use tower_semaphore::{ConcurrencyLimitLayer, Limit, OnUnavailable, Permit, Policy, Semaphore};

use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::semaphore::{down, up};

/// The labels that Prometheus adds to every series.
const OF_TARGETS: [&str; 2] = ["instance", "job"];
/// The number of outcomes of a request.
const RESULTS: usize = 13;

type Labels = BTreeMap<String, String>;

/// What one process exposes: the labels of each series, by name.
#[derive(Default)]
struct Exposition {
    series: BTreeMap<String, Vec<Labels>>,
    values: BTreeMap<String, f64>,
}

impl Exposition {
    /// Names and label values here need no escaping.
    fn new(text: &str) -> Self {
        let mut all = Self::default();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels =
                labels.trim_end_matches('}').split("\",").filter(|label| !label.is_empty());
            let labels = labels.map(|label| {
                let (name, value) = label.split_once("=\"").unwrap();
                (name.to_owned(), value.trim_end_matches('"').to_owned())
            });
            all.series.entry(name.to_owned()).or_default().push(labels.collect());
            all.values.insert(series.to_owned(), value.parse().unwrap());
        }
        all
    }

    /// Returns what is wrong with a query, if anything.
    fn check(&self, query: &str) -> Result<Query, String> {
        let query = query.replace("$__rate_interval", "5m");
        let query = query.replace("$policy", ".*").replace("$instance", ".*");
        let expr = parser::parse(&query)?;
        let mut seen = Query::default();
        walk_expr(&mut seen, &expr)?;
        for selector in &seen.selectors {
            self.check_selector(selector)?;
        }
        for aggregate in &seen.aggregates {
            let mut inner = Query::default();
            walk_expr(&mut inner, &aggregate.expr)?;
            for label in aggregate.modifier.iter().flat_map(|by| &by.labels().labels) {
                let has = |selector: &VectorSelector| self.has(selector, label);
                if !OF_TARGETS.contains(&&**label) && !inner.selectors.iter().any(has) {
                    return Err(format!("nothing below `by ({label})` has that label"));
                }
            }
        }
        Ok(seen)
    }

    fn of(&self, selector: &VectorSelector) -> &[Labels] {
        let name = selector.name.as_deref().unwrap_or_default();
        self.series.get(name).map_or(&[], Vec::as_slice)
    }

    fn has(&self, selector: &VectorSelector, label: &str) -> bool {
        self.of(selector).iter().any(|labels| labels.contains_key(label))
    }

    fn check_selector(&self, selector: &VectorSelector) -> Result<(), String> {
        let all = self.of(selector);
        if all.is_empty() {
            return Err(format!("nothing is called {:?}", selector.name));
        }
        let matchers = selector.matchers.matchers.iter();
        let matchers: Vec<_> =
            matchers.filter(|matcher| !OF_TARGETS.contains(&&*matcher.name)).collect();
        for matcher in &matchers {
            if !self.has(selector, &matcher.name) {
                return Err(format!("no {:?} has the label {}", selector.name, matcher.name));
            }
            // Each alternative is an existing value.
            for word in matcher.value.split('|').filter(|word| !word.is_empty() && *word != ".*") {
                if !all.iter().any(|labels| labels.get(&matcher.name).is_some_and(|v| v == word)) {
                    return Err(format!("no {:?} has {}={word:?}", selector.name, matcher.name));
                }
            }
        }
        let value = |labels: &Labels, name: &str| labels.get(name).cloned().unwrap_or_default();
        let fits = |labels: &Labels| {
            matchers.iter().all(|matcher| matcher.is_match(&value(labels, &matcher.name)))
        };
        if all.iter().any(fits) { Ok(()) } else { Err(format!("nothing fits {selector:?}")) }
    }
}

/// What a query consists of.
#[derive(Default)]
struct Query {
    selectors: Vec<VectorSelector>,
    aggregates: Vec<AggregateExpr>,
}

impl Query {
    /// The labels that its result can have.
    fn labels(&self) -> BTreeSet<&str> {
        let modifiers = self.aggregates.iter().filter_map(|aggregate| aggregate.modifier.as_ref());
        modifiers.flat_map(|by| &by.labels().labels).map(String::as_str).collect()
    }
}

impl ExprVisitor for Query {
    type Error = String;

    fn pre_visit(&mut self, expr: &Expr) -> Result<bool, String> {
        match expr {
            Expr::VectorSelector(selector) => self.selectors.push(selector.clone()),
            Expr::MatrixSelector(matrix) => self.selectors.push(matrix.vs.clone()),
            Expr::Aggregate(aggregate) => self.aggregates.push(aggregate.clone()),
            _ => {}
        }
        Ok(true)
    }
}

/// Returns the words of `text` between `{{` and `}}`.
fn placeholders(text: &str) -> impl Iterator<Item = &str> {
    text.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap_or_default().trim())
}

fn exporter() -> (PrometheusHandle, &'static PrometheusRecorder) {
    let mut exporter = PrometheusBuilder::new().with_recommended_naming(true);
    for (name, buckets) in BUCKETS {
        exporter =
            exporter.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets).unwrap();
    }
    let recorder: &'static PrometheusRecorder = Box::leak(Box::new(exporter.build_recorder()));
    (recorder.handle(), recorder)
}

fn policy(name: &'static str, limit: impl Into<Limit>, on_unavailable: OnUnavailable) -> Policy {
    let policy = Policy::builder(limit).max_queue(1).lease(Policy::MIN_LEASE).name(name);
    policy.on_unavailable(on_unavailable).build().unwrap()
}

/// Has every outcome happen at least once.
async fn everything(redis: &mut TestRedis, semaphore: &Semaphore) -> Vec<Permit> {
    let one = policy("jobs", 1, OnUnavailable::Refuse);
    let held = semaphore.acquire("x", &one).await.unwrap();
    semaphore.try_acquire("x", &one).await.unwrap_err();
    let mut waits = task::spawn(semaphore.acquire("x", &one));
    assert_pending!(waits.poll());
    eventually("it waits", async || semaphore.inspect("x").await.is_ok_and(|x| x.waiting == 1))
        .await;
    semaphore.acquire("x", &one).await.unwrap_err();
    assert_pending!(waits.poll());
    drop(held);
    let mut leaves = task::spawn(semaphore.acquire("y", &one));
    assert_pending!(leaves.poll());
    drop(leaves);
    let held = waits.await.unwrap();
    let short = Policy::builder(1).wait_timeout(Duration::from_millis(30)).name("jobs");
    semaphore.acquire("x", &short.build().unwrap()).await.unwrap_err();
    let unlimited = policy("jobs", Limit::Unlimited, OnUnavailable::Refuse);
    drop(semaphore.acquire("x", &unlimited).await.unwrap());

    let layer = ConcurrencyLimitLayer::builder(semaphore, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit(1)
        .key_labels(KeyLabels::listed(["acme"]));
    for (layer, tenant) in [
        (layer.build().unwrap(), Some("acme")),
        (
            ConcurrencyLimitLayer::builder(semaphore, "strict")
                .limit(1)
                .key(HeaderKey::from_static("x-tenant"))
                .build()
                .unwrap(),
            None,
        ),
        (
            ConcurrencyLimitLayer::builder(semaphore, "lax")
                .limit(1)
                .key(HeaderKey::from_static("x-tenant"))
                .on_missing_key(MissingKey::Bypass)
                .build()
                .unwrap(),
            None,
        ),
    ] {
        let service = layer.layer(service_fn(async |_: http::Request<()>| {
            Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::new()))
        }));
        let mut request = http::Request::builder();
        if let Some(tenant) = tenant {
            request = request.header("x-tenant", tenant);
        }
        drop(service.oneshot(request.body(()).unwrap()).await.unwrap());
    }

    redis.command::<()>(&["SET", "semaphore:{taken}", "1"]);
    semaphore.acquire("taken", &one).await.unwrap_err();
    redis.signal("STOP");
    semaphore.acquire("z", &one).await.unwrap_err();
    redis.signal("CONT");
    redis.kill();
    down(semaphore).await;
    drop(semaphore.acquire("z", &policy("admit", 1, OnUnavailable::Admit)).await.unwrap());
    drop(semaphore.acquire("z", &policy("local", 1, OnUnavailable::Local(1))).await.unwrap());
    held.lost().await;
    redis.restart();
    up(semaphore).await;
    let last = semaphore.acquire("last", &one).await.unwrap();
    vec![held, last]
}

async fn exposed() -> String {
    let (prometheus, recorder) = exporter();
    let _here = set_default_local_recorder(recorder);
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let permits = everything(&mut redis, &semaphore).await;
    let closed = Semaphore::in_memory();
    closed.shutdown().await;
    closed.acquire("x", &policy("jobs", 1, OnUnavailable::Refuse)).await.unwrap_err();
    let text = prometheus.render();
    drop(permits);
    semaphore.shutdown().await;
    text
}

#[tokio::test]
async fn every_query_finds_what_it_asks_for() {
    let text = exposed().await;
    if let Ok(path) = std::env::var("TEST_EXPOSITION") {
        std::fs::write(path, &text).unwrap();
    }
    let exposition = Exposition::new(&text);
    let results: BTreeSet<&str> = exposition
        .values
        .iter()
        .filter(|(series, count)| series.starts_with("concurrency_limit_requests") && **count > 0.0)
        .filter_map(|(series, _)| series.split("result=\"").nth(1)?.split('"').next())
        .collect();
    assert_eq!(results.len(), RESULTS, "not all of them happened: {results:?}");

    let mut asked = BTreeSet::new();
    let mut check = |what: &str, query: &str, needs: Vec<&str>| {
        let seen =
            exposition.check(query).unwrap_or_else(|error| panic!("{what}: {error}\n{query}"));
        for label in needs {
            assert!(seen.labels().contains(label), "{what}: its answer has no label {label}");
        }
        asked.extend(seen.selectors.iter().filter_map(|selector| selector.name.clone()));
    };

    let dashboard = include_str!("../../examples/observability/grafana.json");
    let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let mut panels = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        for target in panel["targets"].as_array().into_iter().flatten() {
            let legend = placeholders(target["legendFormat"].as_str().unwrap()).collect();
            check(title, target["expr"].as_str().unwrap(), legend);
            panels += 1;
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        let Some(query) = variable["definition"].as_str() else { continue };
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (metric, label) = inner.unwrap().split_once(", ").unwrap();
        check(query, &format!("sum by ({label}) ({metric})"), vec![label]);
    }

    let rules = include_str!("../../examples/observability/alerts.yml");
    let page = include_str!("../../docs/observability.md");
    let rules: serde_yaml_ng::Value = serde_yaml_ng::from_str(rules).unwrap();
    let mut alerts = 0;
    for rule in rules["groups"][0]["rules"].as_sequence().unwrap() {
        let name = rule["alert"].as_str().unwrap();
        let summary = rule["annotations"]["summary"].as_str().unwrap();
        let labels = placeholders(summary).filter_map(|word| word.strip_prefix("$labels."));
        check(name, rule["expr"].as_str().unwrap(), labels.collect());
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not documented");
        alerts += 1;
    }
    assert!(panels >= 20 && alerts >= 7, "{panels} {alerts}");

    // Everything that is exposed is on the dashboard.
    let families = exposition.series.keys().map(|name| {
        let family =
            ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
        family.unwrap_or(name)
    });
    for family in families {
        assert!(asked.iter().any(|name| name.starts_with(family)), "nobody asks for {family}");
    }
}

#[test]
fn a_query_for_something_else_is_found() {
    let exposition = Exposition::new(
        "# TYPE a counter\na_total{policy=\"p\",result=\"limit\"} 1\nb{le=\"+Inf\"} 2\n",
    );
    let wrong = [
        ("rate(c_total[5m])", "nothing is called"),
        ("a_total{polcy=\"p\"}", "has the label polcy"),
        ("a_total{result=~\"limit|full\"}", "has result=\"full\""),
        ("sum by (key) (a_total)", "by (key)"),
        ("sum by (result) (b) / sum by (result) (a_total)", "by (result)"),
        ("sum(a_total", "unclosed"),
    ];
    for (query, what) in wrong {
        let error = exposition.check(query).err().unwrap_or_else(|| panic!("{query} passes"));
        assert!(error.contains(what), "{query}: {error}");
    }
    for query in ["sum by (policy, instance) (rate(a_total{result=\"limit\"}[5m]))", "b{le!=\"\"}"]
    {
        exposition.check(query).map(drop).unwrap();
    }
}
