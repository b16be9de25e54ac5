//! The layer for requests of any type.

use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use super::keep::Release;
use super::permitted::Permitted;
use crate::ask::Ask;
use crate::policy::Policy;
use crate::semaphore::{Permit, Semaphore};

/// A [`Layer`] that takes a permit for each call of a service, whatever its requests are.
///
/// Clones share everything. `Req` is the type of the requests, and `K` what becomes of the permit once there is a
/// response: [`Release`], or a closure that [keeps](Self::keep) it. For requests of HTTP,
/// [`ConcurrencyLimitLayer`](crate::ConcurrencyLimitLayer) does more. See the [module](super) for errors and examples.
pub struct PermitLayer<Req, K = Release> {
    settings: Arc<Settings<Req>>,
    keep: K,
}

/// What a layer shares with its services.
pub(super) struct Settings<Req> {
    pub(super) semaphore: Semaphore,
    pub(super) policy: Policy,
    pub(super) ask: Arc<AskOf<Req>>,
    pub(super) attach: Option<Arc<Attach<Req>>>,
}

type AskOf<Req> = dyn Fn(&Req) -> Ask + Send + Sync;
type Attach<Req> = dyn Fn(&mut Req, Permit) + Send + Sync;

impl<Req> PermitLayer<Req> {
    /// Creates a layer that takes its permits from this semaphore, by this policy.
    ///
    /// `ask` names the semaphore of a request: it returns a name, or an [`Ask`] with a tenant and a cost. It is called in
    /// the task that makes the call, and must not block.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Ask, PermitLayer, Policy, Semaphore};
    ///
    /// struct Job {
    ///     tenant: String,
    ///     gpus: u32,
    /// }
    ///
    /// let semaphore = Semaphore::in_memory();
    /// // One name for all.
    /// let all = PermitLayer::new(&semaphore, Policy::new(8), |_: &Job| "jobs");
    /// // The tenants share eight GPUs fairly.
    /// let gpus = PermitLayer::new(&semaphore, Policy::new(8), |job: &Job| {
    ///     Ask::of("gpus").by(&job.tenant).cost(job.gpus)
    /// });
    /// # let _ = (all, gpus);
    /// ```
    pub fn new<F, A>(semaphore: &Semaphore, policy: Policy, ask: F) -> Self
    where
        F: Fn(&Req) -> A + Send + Sync + 'static,
        A: Into<Ask>,
    {
        let ask = Arc::new(move |request: &Req| ask(request).into());
        let settings = Settings { semaphore: semaphore.clone(), policy, ask, attach: None };
        Self { settings: Arc::new(settings), keep: Release }
    }
}

impl<Req, K> PermitLayer<Req, K> {
    /// Sets a closure that hands the permit to the request before the inner service is called.
    ///
    /// The service then knows how long the request waited, and notices a [loss](Permit::lost). A clone that it keeps
    /// holds the permit beyond the response, for work that goes on in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Permit, PermitLayer, Policy, Semaphore};
    ///
    /// struct Job {
    ///     permit: Option<Permit>,
    /// }
    ///
    /// let semaphore = Semaphore::in_memory();
    /// let layer = PermitLayer::new(&semaphore, Policy::new(8), |_: &Job| "jobs")
    ///     .attach(|job, permit| job.permit = Some(permit));
    /// # let _ = layer;
    /// ```
    #[must_use]
    pub fn attach(mut self, attach: impl Fn(&mut Req, Permit) + Send + Sync + 'static) -> Self {
        let Settings { semaphore, policy, ask, .. } = &*self.settings;
        self.settings = Arc::new(Settings {
            semaphore: semaphore.clone(),
            policy: policy.clone(),
            ask: Arc::clone(ask),
            attach: Some(Arc::new(attach)),
        });
        self
    }

    /// Sets a closure that decides what becomes of the permit once the inner service has responded.
    ///
    /// The default is [`Release`]. A response that is a stream, or a handle on work in progress, counts until its end if it
    /// keeps the permit. The closure makes what the caller gets in place of the response. An error keeps nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{PermitLayer, Policy, Semaphore};
    ///
    /// struct Job;
    ///
    /// let semaphore = Semaphore::in_memory();
    /// // The caller drops the permit when it has read the output.
    /// let layer = PermitLayer::new(&semaphore, Policy::new(8), |_: &Job| "jobs")
    ///     .keep(|output: String, permit| (output, permit));
    /// # let _ = layer;
    /// ```
    #[must_use]
    pub fn keep<Res, Out, F>(self, keep: F) -> PermitLayer<Req, F>
    where
        F: Fn(Res, Permit) -> Out + Clone,
    {
        PermitLayer { settings: self.settings, keep }
    }
}

impl<S, Req, K: Clone> Layer<S> for PermitLayer<Req, K> {
    type Service = Permitted<S, Req, K>;

    fn layer(&self, inner: S) -> Permitted<S, Req, K> {
        Permitted::new(inner, Arc::clone(&self.settings), self.keep.clone())
    }
}

impl<Req, K: Clone> Clone for PermitLayer<Req, K> {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings), keep: self.keep.clone() }
    }
}

impl<Req, K> fmt::Debug for PermitLayer<Req, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitLayer").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl<Req> fmt::Debug for Settings<Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("policy", &self.policy).finish_non_exhaustive()
    }
}
