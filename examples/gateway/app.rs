//! What is in force: the layers in front of the upstream, and how others take their place.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use tower::ServiceExt;
use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Limit, Name, Semaphore};

use super::args::{Args, Rule, Site};
use super::file::{File, FileError};
use super::proxy::{Proxy, Upstream, problem};

const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// Keys that are remembered before those that came too long ago are forgotten.
const KEYS_KEPT: usize = 1024;

/// The layers in force. A request keeps those that it met, whatever comes after it.
pub(crate) struct Current {
    semaphore: Semaphore,
    site: Site,
    app: RwLock<Arc<App>>,
}

struct App {
    router: Router,
    proxy: Arc<Proxy>,
    upstream: Upstream,
    rules: Vec<(Rule, Arc<Lately>)>,
}

impl Current {
    /// As it is said on the command line and in the file.
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

    pub(crate) fn listen(&self) -> SocketAddr {
        self.site.listen.unwrap_or(LISTEN)
    }

    #[cfg(feature = "admin")]
    pub(crate) const fn admin(&self) -> &super::admin::AdminArgs {
        &self.site.admin
    }

    pub(crate) async fn serve(self: Arc<Self>, request: Request) -> Response {
        let router = self.app().router.clone();
        router.oneshot(request).await.into_response()
    }

    /// Reads the file again. Requests that come from here on meet what it says; if it cannot be
    /// used, all stays as it was.
    pub(crate) async fn reload(&self, args: &Args) -> Result<(), FileError> {
        let said = Said::read(args)?;
        let (old, new) = (&self.site, &said.site);
        let fixed = [
            ("listen", old.listen == new.listen),
            ("redis", old.redis == new.redis),
            ("after-loss", old.after_loss == new.after_loss),
            ("tenant-salt-file", old.tenant_salt_file == new.tenant_salt_file),
            #[cfg(feature = "admin")]
            ("admin", old.admin == new.admin),
        ];
        if let Some((field, _)) = fixed.iter().find(|(_, is_same)| !is_same) {
            return Err(said.site_error(field, "changed; allowed: with a restart"));
        }
        let before = self.app();
        let app = Arc::new(said.app(&self.semaphore, Some(&before))?);
        *self.app.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&app);
        for (rule, lately) in &before.rules {
            if let Some((new, _)) = app.rules.iter().find(|(new, _)| new.name == rule.name) {
                self.let_in(rule, new, lately).await;
            }
        }
        Ok(())
    }

    /// Where a limit was raised, lets those in who wait already: they were put into the queue under
    /// the old one, and are granted permits by whoever comes with the new one.
    async fn let_in(&self, old: &Rule, new: &Rule, lately: &Lately) {
        let keys = lately.keys();
        let is_raised = |old, new| match (old, new) {
            (Limit::Permits(old), Limit::Permits(new)) => old < new,
            (Limit::Permits(_), Limit::Unlimited) => true,
            (Limit::Unlimited, _) => false,
        };
        let raised = keys.iter().filter(|key| {
            is_raised(old.limit_of(key), new.limit_of(key))
                || is_raised(old.shared_limit_of(key), new.shared_limit_of(key))
        });
        let tries = raised.map(|key| {
            let limit = new.limit_of(key);
            let permits = if let Limit::Permits(permits) = limit { permits } else { u32::MAX };
            let (ask, policy) = new.ask_again(key, permits);
            async move { self.semaphore.try_acquire(ask, &policy).await }
        });
        // Whether they are granted one does not matter.
        drop(join_all(tries).await);
    }

    fn app(&self) -> Arc<App> {
        Arc::clone(&self.app.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What command line and file say together.
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
            return Err(self.site_error("upstream", "not set; allowed: http://host[:port][/base]"));
        };
        // Its connections stay open, if it may.
        let same = before.filter(|before| before.upstream == upstream);
        let via = self.rules.first().map_or("gateway", |rule| &rule.name);
        let proxy = same.map_or_else(
            || Arc::new(Proxy::new(upstream.clone(), via)),
            |before| Arc::clone(&before.proxy),
        );
        let forward = {
            let proxy = Arc::clone(&proxy);
            move |request| async move { proxy.forward(request).await }
        };
        let mut router = Router::new().fallback(forward);
        let mut rules = Vec::new();
        // What is put on last is outermost.
        for (i, rule) in self.rules.iter().enumerate().rev() {
            let lately = Arc::new(Lately::new(rule.wait));
            let layer = layer(semaphore, rule, &lately).map_err(|error| self.refused(i, &error))?;
            router = router.layer(layer);
            if rule.has_cost() {
                let costs = Arc::new(rule.clone());
                router = router.layer(middleware::from_fn(move |request, next| {
                    let costs = Arc::clone(&costs);
                    async move { counted(&costs, request, next).await }
                }));
            }
            rules.push((rule.clone(), lately));
        }
        Ok(App { router, proxy, upstream, rules })
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
    let limit = move |key: &Name, _: &Parts| {
        lately.came(key);
        limits.limit_of(key)
    };
    builder.limit_by(limit).skip(move |parts| !paths.is_for(parts.uri.path())).build()
}

/// Passes a request on to its rule, if its cost can be used.
async fn counted(rule: &Rule, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match rule.bad_cost(&parts) {
        Some(what) => problem(StatusCode::BAD_REQUEST, &what),
        None => next.run(Request::from_parts(parts, body)).await,
    }
}

/// Whose requests came so lately that they may be waiting still.
struct Lately {
    wait: Duration,
    keys: Mutex<Keys>,
}

struct Keys {
    came: HashMap<Name, Instant>,
    /// With so many it is time to forget some.
    most: usize,
}

impl Lately {
    fn new(wait: Duration) -> Self {
        let keys = Keys { came: HashMap::new(), most: KEYS_KEPT };
        Self { wait, keys: Mutex::new(keys) }
    }

    fn came(&self, key: &Name) {
        let now = Instant::now();
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = keys.came.get_mut(key) {
            *at = now;
            return;
        }
        if keys.came.len() >= keys.most {
            keys.came.retain(|_, at| now.duration_since(*at) <= self.wait);
            keys.most = KEYS_KEPT.max(keys.came.len() * 2);
        }
        keys.came.insert(key.clone(), now);
    }

    fn keys(&self) -> Vec<Name> {
        let now = Instant::now();
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = keys.came.iter().filter(|(_, at)| now.duration_since(**at) <= self.wait);
        recent.map(|(key, _)| key.clone()).collect()
    }
}
