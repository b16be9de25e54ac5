//! A request of any type on its way in, and its permit while the inner service has it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::layer::Settings;
use super::passage::Entry;
use crate::error::AcquireError;
use crate::semaphore::{Acquire, Permit};

/// A request that waits for its permit.
pub(super) struct PlainEntry<Req> {
    acquire: Acquire,
    request: Option<Req>,
}

/// A permit that [lingers](Permit::break_off) if it is dropped while the inner service has its request.
pub(super) struct Held {
    permit: Permit,
    is_called: bool,
}

impl<Req> PlainEntry<Req> {
    pub(super) fn new(request: Req, settings: &Settings<Req>) -> Self {
        let acquire = settings.semaphore.acquire((settings.ask)(&request), &settings.policy);
        Self { acquire, request: Some(request) }
    }
}

impl Held {
    /// The inner service has responded: the request is complete.
    pub(super) fn complete(mut self) -> Permit {
        self.is_called = false;
        self.permit.clone()
    }

    pub(super) const fn permit(&self) -> &Permit {
        &self.permit
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_called {
            self.permit.break_off();
        }
    }
}

impl<Req> Entry for PlainEntry<Req> {
    type Settings = Arc<Settings<Req>>;
    type Request = Req;
    type Held = Held;
    type Refused = AcquireError;

    fn poll_pass(
        &mut self,
        _: &Arc<Settings<Req>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Held, AcquireError>> {
        let permit = ready!(Pin::new(&mut self.acquire).poll(cx))?;
        Poll::Ready(Ok(Held { permit, is_called: false }))
    }

    fn enter(&mut self, held: &mut Held, settings: &Arc<Settings<Req>>) -> Option<Req> {
        let mut request = self.request.take()?;
        if let Some(attach) = &settings.attach {
            attach(&mut request, held.permit.clone());
        }
        held.is_called = true;
        Some(request)
    }

    fn lease<'a>(held: &'a Held, _: &Arc<Settings<Req>>) -> Option<&'a Permit> {
        Some(&held.permit)
    }

    fn on_pending(_: &Held) {}
}
