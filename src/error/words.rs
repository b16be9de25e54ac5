//! Rejections in words.

use std::fmt;
use std::time::Duration;

use super::rejected::{ByTime, Rejected};
use crate::ask::Estimate;
use crate::protocol::RejectReason;

impl Rejected {
    /// Says why the semaphore of this name granted nothing; `None`: the caller knows which one.
    pub(crate) const fn said_of<'a>(&'a self, name: Option<&'a str>) -> impl fmt::Display + 'a {
        Said { rejected: self, name }
    }
}

/// A rejection in words, the same for a permit and for a layer.
struct Said<'a> {
    rejected: &'a Rejected,
    name: Option<&'a str>,
}

/// The name behind this word, if there is one.
struct Named<'a>(&'a str, Option<&'a str>);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(word, name) = self;
        name.map_or(Ok(()), |name| write!(f, " {word} {name}"))
    }
}

impl fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Rejected { limit, each, waited, ends_in, .. } = self.rejected;
        let (of, it) = (Named("of", self.name), self.name.unwrap_or("the semaphore"));
        match self.rejected.reason {
            RejectReason::Limit if limit == 0 => write!(f, "the limit{of} is 0"),
            // The share of a process, in an outage.
            RejectReason::Limit if limit == u32::MAX => write!(f, "no permit{of} is free"),
            RejectReason::Limit if self.rejected.is_behind_others() => {
                write!(f, "other requests{of} wait, and are served first")
            }
            RejectReason::Limit => write!(f, "all {limit} permits{of} are in use"),
            RejectReason::TenantLimit if each == Some(0) => {
                write!(f, "the tenant may have no permits{of}")
            }
            RejectReason::TenantLimit => {
                write!(f, "all ")?;
                each.map_or(Ok(()), |each| write!(f, "{each} "))?;
                write!(f, "permits{of} that the tenant may have are in use")
            }
            RejectReason::FurtherLimit(_) | RejectReason::InvalidLimits => self.write_further(f),
            RejectReason::CostTooHigh => self.write_cost(f),
            RejectReason::Rate => {
                write!(f, "as many requests{of} have started lately as the rate allows")?;
                self.rejected.rate().map_or(Ok(()), |rate| write!(f, ", {rate}"))?;
                ends_in.map_or(Ok(()), |left| write!(f, "; the next can in {}", Seconds(left)))
            }
            RejectReason::Budget(_) => {
                write!(f, "the ")?;
                let budget = self.rejected.budget();
                budget.map_or(Ok(()), |budget| write!(f, "{} ", budget.name()))?;
                write!(f, "budget{of} is used up")?;
                budget.map_or(Ok(()), |budget| write!(f, ", {budget}"))?;
                ends_in.map_or(Ok(()), |left| {
                    write!(f, "; it allows the request in {}", Seconds(left))
                })
            }
            RejectReason::QueueFull => self.write_queue(f),
            RejectReason::QueueTimeout if let Some(by) = self.rejected.by_time() => {
                self.write_no_start(&by, f)
            }
            RejectReason::QueueTimeout => {
                let is_tenant_full = self.rejected.is_tenant_full;
                if let Some((limit, cap)) = self.rejected.further().filter(|_| !is_tenant_full) {
                    let within = Within(waited);
                    write!(f, "no permit{of} came free {within}; ")?;
                    return write!(f, "its {limit} limit of {cap} was full when it began to wait");
                }
                match each.filter(|_| is_tenant_full) {
                    Some(each) => {
                        write!(f, "none of the {each} permits{of} that the tenant may have")?;
                    }
                    None if limit == u32::MAX => write!(f, "no permit{of}")?,
                    None => write!(f, "none of {limit} permits{of}")?,
                }
                write!(f, " came free {}", Within(waited))
            }
            RejectReason::Hopeless => {
                write!(f, "none of {limit} permits{of} will come free in time")?;
                let wait = self.rejected.expected_wait();
                wait.map_or(Ok(()), |wait| write!(f, "; the wait would be {}", Seconds(wait)))
            }
            RejectReason::Quarantine => {
                self.name.map_or(Ok(()), |name| write!(f, "{name}: "))?;
                f.write_str(QUARANTINE)?;
                ends_in.map_or(Ok(()), |left| write!(f, ", for another {}", Seconds(left)))
            }
            RejectReason::Paused => write!(f, "an operator paused {it}; it grants no permits"),
            RejectReason::UpstreamPause => {
                write!(f, "{it} is paused until a time; it grants no permits")?;
                ends_in.map_or(Ok(()), |left| write!(f, " for another {}", Seconds(left)))
            }
            RejectReason::Draining => write!(f, "{it} is being drained; it takes no new requests"),
            RejectReason::Revoked => {
                let in_it = Named("in", self.name);
                write!(f, "an operator revoked the place of the request{in_it}")
            }
            // There are no others.
            other => f.write_str(other.as_str()),
        }
    }
}

impl Said<'_> {
    /// With the name of the limit, and not the value, which can be a client's.
    fn write_further(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = Named("of", self.name);
        match self.rejected.further() {
            _ if self.rejected.reason == RejectReason::InvalidLimits => write!(
                f,
                "the request names more than {} further limits or {} budgets{of}, or one of them twice",
                crate::Ask::MAX_FURTHER,
                crate::Ask::MAX_BUDGETS
            ),
            Some((limit, 0)) => {
                write!(f, "the request may have no permits{of}: its {limit} limit is 0")
            }
            Some((limit, cap)) => {
                write!(f, "all {cap} permits{of} that its {limit} limit allows are in use")
            }
            None => write!(f, "all permits{of} that one of its further limits allows are in use"),
        }
    }

    fn write_cost(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (&Rejected { cost, limit, each, .. }, of) = (self.rejected, Named("of", self.name));
        if let Some(Estimate { budget, units }) = self.rejected.estimate() {
            let (name, most) = (budget.name(), budget.burst_amount());
            return write!(
                f,
                "the request is estimated to use {units} of the {name} budget{of}; expected 0 to {most}, as much as may be \
                 used at once"
            );
        }
        write!(f, "the request asks for {cost} permits{of}; expected 1 to 64")?;
        let limit = Some(limit).filter(|limit| *limit < u32::MAX);
        let rate = self.rejected.rate().filter(|rate| cost > rate.starts() && !rate.is_smooth());
        let bounds = [
            limit.map(|limit| format!("the limit of {limit}")),
            rate.map(|rate| format!("the rate of {rate}")),
            each.map(|each| format!("its tenant's cap of {each}")),
            self.rejected.further().map(|(name, cap)| format!("its {name} limit of {cap}")),
        ];
        let bounds: Vec<_> = bounds.into_iter().flatten().collect();
        if bounds.is_empty() { Ok(()) } else { write!(f, ", within {}", bounds.join(" and ")) }
    }

    /// A permit may have been free all the time.
    fn write_no_start(&self, by: &ByTime<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Rejected { waited, ends_in, .. } = self.rejected;
        let of = Named("of", self.name);
        match by {
            ByTime::Rate => {
                write!(f, "the rate{of}")?;
                self.rejected.rate().map_or(Ok(()), |rate| write!(f, ", {rate},"))?;
            }
            ByTime::Budget(Some(Estimate { budget, .. })) => {
                write!(f, "the {} budget{of}, {budget},", budget.name())?;
            }
            ByTime::Budget(None) => write!(f, "a budget{of}")?,
            ByTime::Either => write!(f, "the rate or a budget{of}")?,
        }
        write!(f, " allowed no start {}", Within(waited))?;
        ends_in.map_or(Ok(()), |left| write!(f, "; the next can in {}", Seconds(left)))
    }

    /// Names the line that was full: that of the tenant, if there are tenants.
    fn write_queue(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (&Rejected { waiting, has_tenant, .. }, name) = (self.rejected, self.name);
        if has_tenant {
            write!(f, "the tenant's queue{} is full", Named("for", name))?;
        } else {
            write!(f, "the queue{} is full", Named("of", name))?;
        }
        let Some(waiting) = waiting else { return Ok(()) };
        let of_all = if has_tenant { " of all tenants" } else { "" };
        write!(f, "; {waiting} requests{of_all} are waiting")
    }
}

/// Why nothing is granted in a quarantine.
pub(crate) const QUARANTINE: &str =
    "data may have been lost; no permits are granted until those in use have been counted again";

/// A duration as people read it: seconds with one decimal.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s", self.0.as_secs_f64())
    }
}

/// For how long something did not happen. Where that is no time worth naming, as where a request's budget left it none,
/// no figure is given.
pub(crate) struct Within(pub(crate) Duration);

impl fmt::Display for Within {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < Duration::from_millis(50) {
            f.write_str("in time")
        } else {
            write!(f, "within {}", Seconds(self.0))
        }
    }
}
