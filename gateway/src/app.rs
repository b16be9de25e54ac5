//! The layers in front of the upstream, and how a reload replaces them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tower::{Layer, Service, ServiceExt};
use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Permit, Semaphore};

use super::access_log::Journey;
use super::args::{Args, Rule};
use super::file::{File, FileError};
use super::forward::Forward;
use super::problem::problem;
use super::site::{HostSent, Site};
use super::upstream::Upstream;

/// Keys that are remembered before old ones are evicted.
const KEYS_KEPT: usize = 1024;
/// Keys that are remembered at most, however long requests may wait.
const KEYS_MAX: usize = 10_000;

/// The rules in force, and the way through them.
pub(crate) struct Current {
    semaphore: Semaphore,
    site: Site,
    app: RwLock<Arc<App>>,
}

struct App {
    router: Router,
    forward: Arc<Forward>,
    upstream: Upstream,
    links: Vec<Arc<Link>>,
    /// The header fields that rules read.
    read: Arc<[HeaderName]>,
}

/// A rule on the way to the upstream. It outlives a reload, so that a request that waits in a rule further out is judged
/// by the settings in force when it gets here.
struct Link {
    name: String,
    in_force: RwLock<InForce>,
    lately: Arc<Lately>,
}

/// A rule, and the layer that applies it.
struct InForce {
    rule: Rule,
    layer: ConcurrencyLimitLayer,
}

impl Current {
    /// Applies the command line and the file.
    pub(crate) fn new(args: &Args) -> Result<Self, FileError> {
        let said = Said::read(args)?;
        let semaphore = said.site.semaphore();
        let semaphore = semaphore.map_err(|(field, what)| said.site_error(field, what))?;
        let app = RwLock::new(Arc::new(said.app(&semaphore, None)?));
        Ok(Self { semaphore, site: said.site, app })
    }

    pub(crate) const fn semaphore(&self) -> &Semaphore {
        &self.semaphore
    }

    /// The settings that are no part of a rule.
    pub(crate) const fn site(&self) -> &Site {
        &self.site
    }

    /// Whether any rule rejects requests while the backend is unavailable.
    pub(crate) fn needs_backend(&self) -> bool {
        self.app().links.iter().any(|link| link.in_force().rule.needs_backend())
    }

    /// The header fields that rules read.
    pub(crate) fn fields_read(&self) -> Arc<[HeaderName]> {
        Arc::clone(&self.app().read)
    }

    pub(crate) async fn serve(&self, request: Request) -> Response {
        let router = self.app().router.clone();
        router.oneshot(request).await.into_response()
    }

    /// Reloads the file. A request is judged by the rules in force when it comes to them, and those that wait adopt the
    /// new limits. An invalid file changes nothing.
    pub(crate) async fn reload(&self, args: &Args) -> Result<(), FileError> {
        let said = Said::read(args)?;
        let (old, new) = (&self.site, &said.site);
        if let Some(field) = old.differs(new) {
            return Err(said.site_error(field, "changed; restart the gateway to apply it"));
        }
        let before = self.app();
        let app = Arc::new(said.app(&self.semaphore, Some(&before))?);
        *self.app.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&app);
        for link in &app.links {
            link.let_in(&self.semaphore);
        }
        Ok(())
    }

    fn app(&self) -> Arc<App> {
        Arc::clone(&self.app.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The settings of command line and file together.
struct Said {
    site: Site,
    rules: Vec<Rule>,
    file: Option<File>,
}

impl Said {
    fn read(args: &Args) -> Result<Self, FileError> {
        let Some(path) = &args.config else {
            return Ok(Self {
                site: args.site.clone(),
                rules: vec![args.rule.clone()],
                file: None,
            });
        };
        let file = File::read(path)?;
        let site = args.site.clone().or(file.site.clone());
        Ok(Self { site, rules: file.rules.clone(), file: Some(file) })
    }

    fn app(&self, semaphore: &Semaphore, before: Option<&App>) -> Result<App, FileError> {
        let Some(upstream) = self.site.upstream.clone() else {
            return Err(self.site_error("upstream", format!("not set; {}", Upstream::ALLOWED)));
        };
        // The same upstream keeps its connections.
        let same = before.filter(|before| before.upstream == upstream);
        let forward = match same {
            Some(before) => Arc::clone(&before.forward),
            None => {
                let via = self.rules.first().map_or("gateway", |rule| &rule.name);
                let by_own_name = self.site.host == Some(HostSent::Upstream);
                let bounds = self.site.bounds();
                let forward = Forward::new(upstream.clone(), via, by_own_name, bounds);
                Arc::new(forward.map_err(|what| self.site_error("upstream", what))?)
            }
        };
        let known = |rule: &Rule| before?.links.iter().find(|link| link.name == rule.name);
        let built = self.rules.iter().enumerate().map(|(i, rule)| {
            let link = known(rule);
            let lately = link.map_or_else(Arc::default, |link| Arc::clone(&link.lately));
            lately.is_for(rule.wait);
            let layer = layer(semaphore, rule, &lately).map_err(|error| self.refused(i, &error))?;
            let in_force = InForce { rule: rule.clone(), layer };
            Ok((link, lately, in_force))
        });
        // All of them, before the first is in force.
        let built = built.collect::<Result<Vec<_>, FileError>>()?;
        let links: Vec<_> = built
            .into_iter()
            .map(|(link, lately, in_force)| {
                if let Some(link) = link {
                    *link.in_force.write().unwrap_or_else(PoisonError::into_inner) = in_force;
                    return Arc::clone(link);
                }
                let name = in_force.rule.name.clone();
                Arc::new(Link { name, in_force: RwLock::new(in_force), lately })
            })
            .collect();
        let mut router = Router::new().fallback({
            let forward = Arc::clone(&forward);
            move |request| async move { forward.forward(request).await }
        });
        // The layer that is added last is outermost.
        for link in links.iter().rev() {
            let link = Arc::clone(link);
            router = router.layer(middleware::from_fn_with_state(link, Link::pass));
        }
        let read = self.rules.iter().flat_map(Rule::fields_read);
        let read = read.map(|(_, name)| name.clone()).collect();
        Ok(App { router, forward, upstream, links, read })
    }

    fn refused(&self, rule: usize, error: &ConfigError) -> FileError {
        match &self.file {
            Some(file) => file.refused(rule, error),
            None => FileError::on_the_command_line(error),
        }
    }

    fn site_error(&self, field: &str, what: impl std::fmt::Display) -> FileError {
        match &self.file {
            Some(file) => file.site_error(field, what),
            None => FileError::on_the_command_line(format!("--{field}: {what}")),
        }
    }
}

fn layer(
    semaphore: &Semaphore,
    rule: &Rule,
    lately: &Arc<Lately>,
) -> Result<ConcurrencyLimitLayer, ConfigError> {
    let builder = rule.apply(ConcurrencyLimitLayer::builder(semaphore, &rule.name));
    let (limits, paths, lately) = (rule.clone(), rule.clone(), Arc::clone(lately));
    let limit = move |key: &Name, parts: &Parts| {
        lately.came(key);
        Journey::note_key(&parts.extensions, key);
        limits.limit_of(key)
    };
    builder.limit_by(limit).skip(move |parts| !paths.is_for(parts.uri.path())).build()
}

impl Link {
    fn in_force(&self) -> RwLockReadGuard<'_, InForce> {
        self.in_force.read().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pass(State(link): State<Arc<Self>>, request: Request, next: Next) -> Response {
        let response = {
            let in_force = link.in_force();
            if let Some(what) = in_force.rule.bad_field(&request) {
                // It goes no further, so the rules before used nothing.
                request.extensions().get::<Permit>().into_iter().for_each(Permit::unused);
                return problem(StatusCode::BAD_REQUEST, &what);
            }
            // It has its place in the queue from the call on: a reload comes before that, or finds it there.
            in_force.layer.layer(next).call(request)
        };
        response.await.into_response()
    }

    /// Takes the limits in force to the requests that wait here: each is judged by the limit that it was made with.
    fn let_in(&self, semaphore: &Semaphore) {
        for key in self.lately.keys() {
            let (name, policy) = self.in_force().rule.now(&key);
            semaphore.update_waiting(name, &policy);
        }
    }
}

/// The keys of recent requests, which may still be waiting.
#[derive(Default)]
struct Lately {
    keys: Mutex<Keys>,
}

struct Keys {
    came: HashMap<Name, Instant>,
    /// For how long a request may wait.
    wait: Duration,
    /// Old keys are evicted at this size.
    most: usize,
}

impl Default for Keys {
    fn default() -> Self {
        Self { came: HashMap::new(), wait: Duration::ZERO, most: KEYS_KEPT }
    }
}

impl Lately {
    /// Keys are kept for the longest wait of any.
    fn is_for(&self, wait: Duration) {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.wait = keys.wait.max(wait);
    }

    fn came(&self, key: &Name) {
        let now = Instant::now();
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = keys.came.get_mut(key) {
            *at = now;
            return;
        }
        if keys.came.len() >= keys.most {
            let wait = keys.wait;
            keys.came.retain(|_, at| now.duration_since(*at) <= wait);
            if keys.came.len() >= KEYS_MAX {
                // Clients can make keys up. Requests of keys that are forgotten keep the limit that they came with.
                keys.came.clear();
            }
            keys.most = (keys.came.len() * 2).clamp(KEYS_KEPT, KEYS_MAX);
        }
        keys.came.insert(key.clone(), now);
    }

    fn keys(&self) -> Vec<Name> {
        let now = Instant::now();
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = keys.came.iter().filter(|(_, at)| now.duration_since(**at) <= keys.wait);
        recent.map(|(key, _)| key.clone()).collect()
    }
}
