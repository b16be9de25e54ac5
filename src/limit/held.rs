//! The permit of a request that was passed to the inner service.

use http::header::CONTENT_LENGTH;
use http::{Response, StatusCode};

use super::connection::Inside;
use super::grpc;
use super::refusal::RefusalReason;
use crate::protocol::session::FurtherIn;
use crate::semaphore::Permit;

/// A permit that [lingers](Permit::break_off) if it is dropped before its request is complete, and its layer is
/// configured so.
#[derive(Debug, Default)]
pub(super) struct HeldPermit {
    permit: Option<Permit>,
    /// On whose connection, if that is known: it is looked at as long as this is here.
    inside: Option<Inside>,
    /// Or what happens further in says whether it used anything of its budgets.
    lingers: bool,
    /// Bytes of the body that are still to come, where `content-length` says it. A server does not poll the body
    /// after the last of them.
    left: Option<u64>,
}

impl HeldPermit {
    /// Holds a permit whose request was not passed on yet: it does not linger.
    pub(super) const fn new(permit: Option<Permit>) -> Self {
        Self { permit, inside: None, lingers: false, left: None }
    }

    /// The request is passed on. `inside`: on its connection.
    pub(super) fn begin(&mut self, inside: Option<Inside>, lingers: bool) {
        self.inside = inside.filter(|_| self.permit.is_some());
        self.lingers = lingers;
    }

    /// Holds the permit for the body of this response. A response to HEAD has none, whatever its headers say.
    #[inline]
    pub(super) fn for_body<B>(&mut self, response: &Response<B>, is_head: bool) {
        let Some(permit) = self.permit.as_ref().filter(|_| self.lingers) else { return };
        // Something answered it, so no rejection further in, before or later, is what ends it.
        permit.further_in(FurtherIn::Passed);
        let status = response.status();
        let is_timeout =
            matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT);
        if is_timeout || grpc::is_broken_off(response.headers()) {
            // A timeout further inside has dropped the call.
            permit.break_off();
        }
        let has_none = matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        self.left = if is_head || has_none {
            Some(0)
        } else {
            let length = response.headers().get(CONTENT_LENGTH);
            length.and_then(|length| length.to_str().ok()?.parse().ok())
        };
    }

    /// What follows is no HTTP. The connection of the request holds the permit, if it is upgraded with this; `abort`: it
    /// fails when the permit is lost. Else the handler does, if it keeps the permit.
    pub(super) fn upgraded(&self, abort: bool) {
        let Some(permit) = &self.permit else { return };
        let is_kept = self.inside.as_ref().is_some_and(|inside| inside.keep(permit, abort));
        if !is_kept && self.lingers && permit.is_shared() {
            // The handler drops it at the end of its socket. That the socket broke cannot be told from that it was
            // closed.
            permit.break_off();
        }
    }

    /// The call goes on, whatever a layer further in may have rejected of it.
    pub(super) fn goes_on(&self) {
        if self.lingers
            && let Some(permit) = &self.permit
        {
            permit.further_in(FurtherIn::GoesOn);
        }
    }

    /// A layer further in rejected the request; or aborted it, after the call had begun.
    pub(super) fn refused(&mut self, reason: RefusalReason) {
        if self.lingers
            && reason != RefusalReason::LeaseLost
            && let Some(permit) = &self.permit
        {
            permit.further_in(FurtherIn::Rejected);
        }
        drop(std::mem::take(self));
    }

    /// So many bytes of the body have passed.
    pub(super) const fn passed(&mut self, bytes: usize) {
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(bytes as u64);
        }
    }

    pub(super) const fn get(&self) -> Option<&Permit> {
        self.permit.as_ref()
    }

    /// The request is complete: releases the permit.
    pub(super) fn end(&mut self) {
        self.permit = None;
        self.inside = None;
    }
}

impl Drop for HeldPermit {
    fn drop(&mut self) {
        if let Some(permit) = &self.permit
            && self.lingers
            && self.left != Some(0)
        {
            permit.break_off();
        }
    }
}
