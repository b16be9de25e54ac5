//! The permit of a request that was passed on.

use http::header::CONTENT_LENGTH;
use http::{Response, StatusCode};

use super::grpc;
use super::refusal::RefusalReason;
use crate::semaphore::Permit;

/// A permit that [lingers](Permit::break_off), if its layer says so and this is dropped before its request has
/// ended well.
#[derive(Debug, Default)]
pub(super) struct HeldPermit {
    permit: Option<Permit>,
    lingers: bool,
    /// How many bytes of the body are still to come, where the head says that. A server does not ask for what
    /// comes after them.
    left: Option<u64>,
}

impl HeldPermit {
    pub(super) const fn new(permit: Option<Permit>, lingers: bool) -> Self {
        Self { permit, lingers, left: None }
    }

    /// The same permit, held for the body of this response. One to HEAD has none, whatever its head says.
    #[inline]
    pub(super) fn for_body<B>(&mut self, response: &Response<B>, is_head: bool) {
        let Some(permit) = self.permit.as_ref().filter(|_| self.lingers) else { return };
        let status = response.status();
        let is_timeout =
            matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT);
        if is_timeout || grpc::is_broken_off(response.headers()) {
            // A timeout further in has dropped the call, and not only the wait for it.
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

    /// A layer further in answered in place of the service. Where it cut the request off, that had begun.
    pub(super) fn refused(&mut self, reason: RefusalReason) {
        if reason != RefusalReason::LeaseLost {
            self.end();
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

    /// The request has ended well: gives the permit back.
    pub(super) fn end(&mut self) {
        self.permit = None;
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
