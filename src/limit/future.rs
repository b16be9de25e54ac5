//! The answer to a request: what the inner service said, or why the request was rejected.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::BoxError;
use super::body::{Cut, ResponseBody};
use super::connection::is_upgrade;
use super::entry::{Held, HttpEntry};
use super::grpc::Dialect;
use super::refusal::{Refusal, RefusalReason};
use super::refusal_response::RefusalBody;
use super::settings::{HoldUntil, OnLost, Settings};
use crate::feedback::Head;
use crate::protocol::PauseCause;
use crate::semaphore::Permit;
use crate::service::passage::{Exit, Passage};

pin_project! {
    /// The future of [`ConcurrencyLimit`](super::ConcurrencyLimit).
    ///
    /// A request has its place in the queue from the call on, unless its key or limit must be looked up first: a future
    /// that is kept without being polled keeps it, and a permit with it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its position is lost. A permit that was granted
    /// is released, after its [linger](super::ConcurrencyLimitBuilder::linger) if the inner service was called.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        passage: Passage<S, HttpEntry<B>, S::Future>,
        settings: Arc<Settings>,
    }
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    #[inline]
    pub(super) fn new(service: S, request: Request<B>, settings: Arc<Settings>) -> Self {
        let entry = HttpEntry::new(request, &settings);
        Self { passage: Passage::new(service, entry), settings }
    }
}

impl<S, ReqBody, ResBody> Future for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    type Output = Result<Response<ResponseBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let settings = &*this.settings;
        Poll::Ready(match ready!(this.passage.poll(settings, cx)) {
            Exit::Answered(Ok(response), held) => Ok(settings.answer(response, held)),
            Exit::Answered(Err(error), held) => {
                // Released before the caller sees the error.
                drop(held);
                Err(error)
            }
            Exit::Refused(rejection) => Ok(settings.respond(*rejection.refusal, rejection.grpc)),
            Exit::Lost(held) => Ok(settings.lost(held.permit.get(), held.grpc)),
        })
    }
}

impl Settings {
    /// Gives the response its permit to hold.
    #[inline]
    fn answer<B>(&self, response: Response<B>, held: Held) -> Response<ResponseBody<B>>
    where
        B: Body + Send + 'static,
    {
        let Held { mut permit, would, grpc, is_head, is_tunnel, .. } = held;
        let abort = self.config.on_lost == OnLost::Abort;
        if let Some(refusal) = RefusalBody::refusal_of(&response) {
            // A layer further in rejected or aborted it: that response needs no permit, whatever its status.
            permit.refused(refusal.reason);
        } else {
            self.pass_feedback_on(Head::of(&response), permit.get());
            self.settle_budgets(Head::of(&response), permit.get());
            permit.for_body(&response, is_head);
        }
        if is_upgrade(response.status(), is_tunnel) {
            permit.upgraded(abort);
        }
        // The connection holds a clone of its own.
        if self.config.hold_until == HoldUntil::ResponseHead {
            permit.end();
        }
        let cut = abort.then(|| match grpc.and_then(|_| Dialect::of(response.headers())) {
            Some(Dialect::Grpc) => Cut::Grpc,
            _ => Cut::Error,
        });
        let mut response = response.map(|body| ResponseBody::passed(body, permit, cut));
        if is_head && !response.headers().contains_key(CONTENT_LENGTH) {
            response.body_mut().hide_empty_size();
        }
        if let Some(would) = would {
            response.extensions_mut().insert(*would);
        }
        response
    }

    /// Reads what a response says about the next requests. A layer in shadow changes nothing for others.
    fn pass_feedback_on(&self, head: Head<'_>, permit: Option<&Permit>) {
        if let (Some(read), Some(permit), None) = (&self.config.on_response, permit, &self.shadow) {
            permit.feedback_of(read(head), PauseCause::Status(head.status.as_u16()));
        }
    }

    /// Reads what a response says that its request used of its budgets.
    fn settle_budgets(&self, head: Head<'_>, permit: Option<&Permit>) {
        for budget in &self.config.fair.budgets {
            permit.into_iter().for_each(|permit| budget.read(head, permit));
        }
    }

    /// The response to a request whose permit was lost before there was one.
    fn lost<B>(&self, permit: Option<&Permit>, grpc: Option<Dialect>) -> Response<ResponseBody<B>> {
        let semaphore = permit.map(Permit::name);
        tracing::debug!(target: "tower_semaphore", semaphore, "aborted before its response: the permit is lost");
        let key = semaphore.and_then(|name| self.key_of(name));
        let mut refusal = Refusal::new(&self.name, key, StatusCode::SERVICE_UNAVAILABLE);
        refusal.reason = RefusalReason::LeaseLost;
        refusal.waited_for_lost = permit.map(Permit::waited);
        self.respond(refusal.retry_after(self.config.retry_after), grpc)
    }

    fn respond<B>(&self, refusal: Refusal, grpc: Option<Dialect>) -> Response<ResponseBody<B>> {
        let response = match (grpc, &self.config.response) {
            (Some(grpc), _) => grpc.refuse(&refusal),
            (None, Some(own)) => own.response(&refusal),
            (None, None) => refusal.response(),
        };
        RefusalBody::mark(response, refusal).map(ResponseBody::refused)
    }
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("settings", &self.settings).finish_non_exhaustive()
    }
}
