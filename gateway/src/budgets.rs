//! Budgets of a rule, such as tokens a minute.

use std::collections::HashSet;

use axum::http::{HeaderMap, HeaderName};
use serde::Deserializer;
use tower_semaphore::feedback;
use tower_semaphore::limit::ConcurrencyLimitBuilder;
use tower_semaphore::{Ask, Budget};

use super::{args, file};

/// Where the estimate of a request comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EstimateSource {
    /// The same for all requests.
    Fixed(u64),
    /// A header field, and what counts for a request without it.
    Header(HeaderName, Option<u64>),
}

/// For the budget of this name; `None`: for the only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct For<T> {
    budget: Option<String>,
    value: T,
}

impl For<EstimateSource> {
    /// The header field of a request that is read.
    pub(crate) fn field(&self) -> Option<&HeaderName> {
        match &self.value {
            EstimateSource::Header(name, _) => Some(name),
            EstimateSource::Fixed(_) => None,
        }
    }
}

/// The budgets of a rule, as flags and file say them.
#[derive(Clone, Copy)]
pub(crate) struct Budgets<'a> {
    pub(crate) budgets: &'a [Budget],
    pub(crate) estimates: &'a [For<EstimateSource>],
    pub(crate) settle: &'a [For<HeaderName>],
    pub(crate) left: &'a [For<HeaderName>],
}

/// Reads `NAME=N/TIME`, such as `tokens=80000/60s`, with a burst `tokens=80000/60s,burst=20000`; `,each` at the end: each
/// tenant has one.
pub(crate) fn budget(text: &str) -> Result<Budget, String> {
    const ALLOWED: &str = "expected NAME=N/TIME, such as tokens=80000/60s, tokens=80000/60s,burst=20000 or tokens=8000/60s,each";
    let (text, is_each) = match text.strip_suffix(",each") {
        Some(text) => (text, true),
        None => (text, false),
    };
    let (name, rest) = text.split_once('=').ok_or(ALLOWED)?;
    let (rate, burst) = match rest.split_once(",burst=") {
        Some((rate, burst)) => (rate, Some(burst.parse().map_err(|_| ALLOWED)?)),
        None => (rest, None),
    };
    let (amount, per) = rate.split_once('/').ok_or(ALLOWED)?;
    let per = args::duration(per).map_err(|_| ALLOWED)?;
    let budget = Budget::new(name, amount.parse().map_err(|_| ALLOWED)?, per);
    let budget = budget.and_then(|budget| match burst {
        Some(burst) => budget.burst(burst),
        None => Ok(budget),
    });
    let budget = budget.map(|budget| if is_each { budget.each() } else { budget });
    budget.map_err(|error| error.to_string())
}

/// Reads `[NAME=]SPEC`, of which the value is `header:NAME`, `header:NAME,N` or `N`.
pub(crate) fn estimate(text: &str) -> Result<For<EstimateSource>, String> {
    const ALLOWED: &str = "expected header:NAME, header:NAME,N or N, or with the name of the budget such as \
                           tokens=header:x-tokens";
    named(text, |spec| {
        if let Ok(units) = spec.parse() {
            return Ok(EstimateSource::Fixed(units));
        }
        let (header, without) = match spec.split_once(',') {
            Some((header, without)) => (header, Some(without.parse().map_err(|_| ALLOWED)?)),
            None => (spec, None),
        };
        Ok(EstimateSource::Header(args::cost(header).map_err(|_| ALLOWED)?, without))
    })
}

/// Reads `[NAME=]header:NAME`.
pub(crate) fn field(text: &str) -> Result<For<HeaderName>, String> {
    const ALLOWED: &str =
        "expected header:NAME, or with the name of the budget such as tokens=header:x-used-tokens";
    named(text, |spec| args::cost(spec).map_err(|_| ALLOWED.to_owned()))
}

fn named<T>(text: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<For<T>, String> {
    match text.split_once('=') {
        Some((budget, spec)) => Ok(For { budget: Some(budget.to_owned()), value: read(spec)? }),
        None => Ok(For { budget: None, value: read(text)? }),
    }
}

/// What of these is for this budget.
fn find<'a, T>(of: &'a [For<T>], budget: &Budget) -> Option<&'a T> {
    let is_for = |one: &&For<T>| one.budget.as_ref().is_none_or(|name| name == budget.name());
    of.iter().find(is_for).map(|one| &one.value)
}

impl Budgets<'_> {
    /// Checks the budgets of a rule against each other.
    pub(crate) fn check(self, has_tenants: bool) -> Result<(), (&'static str, String)> {
        let budgets = self.budgets;
        if let Some(each) = budgets.iter().find(|budget| budget.is_each() && !has_tenants) {
            let what = format!(
                "the {} budget is of each tenant, and there are no tenants; set fair-by, too",
                each.name()
            );
            return Err(("budget", what));
        }
        if budgets.len() > Ask::MAX_BUDGETS {
            let what = format!("{} budgets; expected at most {}", budgets.len(), Ask::MAX_BUDGETS);
            return Err(("budget", what));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = budgets.iter().find(|budget| !seen.insert(budget.name())) {
            let what = format!("{:?} is given twice; expected each name once", twice.name());
            return Err(("budget", what));
        }
        self.check_names("estimate", self.estimates)?;
        self.check_names("settle", self.settle)?;
        self.check_names("left", self.left)?;
        for budget in budgets {
            match find(self.estimates, budget) {
                None => {
                    let what = format!(
                        "what a request uses of the {} budget is not said; set estimate, too",
                        budget.name()
                    );
                    return Err(("budget", what));
                }
                Some(EstimateSource::Fixed(units) | EstimateSource::Header(_, Some(units)))
                    if *units > budget.burst_amount() =>
                {
                    let what = format!(
                        "{units} is more of the {} budget than may be used at once; expected 0 to {}",
                        budget.name(),
                        budget.burst_amount()
                    );
                    return Err(("estimate", what));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn check_names<T>(
        self,
        field: &'static str,
        of: &[For<T>],
    ) -> Result<(), (&'static str, String)> {
        let mut seen = HashSet::new();
        for For { budget, .. } in of {
            let what = match budget {
                _ if self.budgets.is_empty() => "there is no budget; set budget, too".to_owned(),
                None if self.budgets.len() > 1 => {
                    "which budget is meant is not said; expected its name in front, such as tokens=header:x-tokens"
                        .to_owned()
                }
                Some(name) if self.budgets.iter().all(|budget| budget.name() != name) => {
                    format!("no budget is called {name:?}; expected the name of one")
                }
                // Without a name it is for the only one.
                _ if !seen.insert(budget) || (self.budgets.len() == 1 && seen.len() > 1) => {
                    "it is said twice of a budget; expected once".to_owned()
                }
                _ => continue,
            };
            return Err((field, what));
        }
        Ok(())
    }

    /// Why the estimate of a request cannot be used, if so.
    pub(crate) fn bad_estimate(self, headers: &HeaderMap) -> Option<String> {
        self.budgets.iter().find_map(|budget| {
            let source = find(self.estimates, budget)?;
            units(headers, source).err()
        })
    }

    pub(crate) fn apply(self, mut builder: ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder {
        for budget in self.budgets {
            let Some(source) = find(self.estimates, budget).cloned() else { continue };
            // An invalid estimate gets here only in shadow, and counts as too high.
            builder = builder.budget(budget.clone(), move |parts| {
                units(&parts.headers, &source).unwrap_or(u64::MAX)
            });
            let used = find(self.settle, budget).cloned().map(feedback::header_number);
            builder = builder.settle_by(budget.name(), move |head| {
                let said = used.as_ref().and_then(|used| used(head));
                // What a provider refuses uses nothing.
                said.or_else(|| matches!(head.status.as_u16(), 429 | 503).then_some(0))
            });
            if let Some(field) = find(self.left, budget).cloned() {
                builder = builder.left_by(budget.name(), feedback::header_number(field));
            }
        }
        builder
    }
}

/// Digits alone: no sign.
fn digits(text: &str) -> Option<u64> {
    let text = text.trim();
    text.parse().ok().filter(|_| text.bytes().all(|c| c.is_ascii_digit()))
}

/// What a request is estimated to use.
fn units(headers: &HeaderMap, source: &EstimateSource) -> Result<u64, String> {
    match source {
        EstimateSource::Fixed(units) => Ok(*units),
        EstimateSource::Header(name, without) => match (headers.get(name), without) {
            (None, Some(units)) => Ok(*units),
            (None, None) => Err(format!("{name}: missing; expected a whole number")),
            (Some(value), _) => value
                .to_str()
                .ok()
                .and_then(digits)
                .ok_or_else(|| format!("{name}: not a whole number below 2^64")),
        },
    }
}

pub(crate) fn budgets_of_file<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Budget>, D::Error> {
    file::list(d, "budget", "tokens=80000/60s", budget)
}

pub(crate) fn estimates_of_file<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<Vec<For<EstimateSource>>, D::Error> {
    file::list(d, "estimate", "header:x-tokens", estimate)
}

pub(crate) fn settle_of_file<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<Vec<For<HeaderName>>, D::Error> {
    file::list(d, "settle", "header:x-used-tokens", field)
}

pub(crate) fn left_of_file<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<Vec<For<HeaderName>>, D::Error> {
    file::list(d, "left", "header:x-ratelimit-remaining-tokens", field)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::{HeaderMap, HeaderName};

    use super::{Budgets, EstimateSource, For, budget, estimate, field, units};

    const TOKENS: HeaderName = HeaderName::from_static("x-tokens");

    #[test]
    fn a_budget_is_read() {
        let tokens = budget("tokens=80000/60s").unwrap();
        assert_eq!((tokens.name(), tokens.amount()), ("tokens", 80_000));
        assert_eq!((tokens.per(), tokens.burst_amount()), (Duration::from_secs(60), 80_000));
        assert_eq!(budget("tokens=80000/60s,burst=20000").unwrap().burst_amount(), 20_000);
        let each = budget("tokens=80000/60s,burst=20000,each").unwrap();
        assert!(each.is_each() && each.burst_amount() == 20_000 && !tokens.is_each());
        assert!(budget("tokens=5/60s,each").unwrap().is_each());
        for text in ["", "tokens", "tokens=", "tokens=5", "tokens=5/60", "=5/60s", "tokens=-5/60s"]
        {
            assert!(budget(text).is_err(), "{text}");
        }
        for text in ["t=0/60s", "t=5/0s", "t=5/60s,burst=6", "t=5/60s,burst=", "t=5/60s,b=6"] {
            assert!(budget(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_estimate_is_a_number_or_in_a_header() {
        let of = |budget: Option<&str>, value| Ok(For { budget: budget.map(str::to_owned), value });
        assert_eq!(estimate("4000"), of(None, EstimateSource::Fixed(4000)));
        let header = |without| EstimateSource::Header(TOKENS, without);
        assert_eq!(estimate("header:x-tokens"), of(None, header(None)));
        assert_eq!(estimate("tokens=header:x-tokens,9"), of(Some("tokens"), header(Some(9))));
        for text in
            ["", "path", "header:", "header:x,", "header:x,-1", "-1", "tokens=", "header:a b"]
        {
            assert!(estimate(text).is_err(), "{text}");
        }
        assert!(field("tokens=header:x-used").is_ok() && field("header:x-used").is_ok());
        assert!(field("9").is_err() && field("tokens=").is_err());
    }

    #[test]
    fn a_request_says_a_whole_number() {
        let mut headers = HeaderMap::new();
        let (with, without) =
            (EstimateSource::Header(TOKENS, Some(7)), EstimateSource::Header(TOKENS, None));
        assert_eq!(units(&headers, &with), Ok(7));
        assert_eq!(
            units(&headers, &without).unwrap_err(),
            "x-tokens: missing; expected a whole number"
        );
        headers.insert(TOKENS, "12".parse().unwrap());
        assert_eq!(units(&headers, &without), Ok(12));
        for text in ["", "-1", "+1", "1.5", "many", "99999999999999999999"] {
            headers.insert(TOKENS, text.parse().unwrap());
            assert!(units(&headers, &with).unwrap_err().contains("not a whole number"), "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_together_is_said() {
        let check = |budgets: &[&str], estimates: &[&str], settle: &[&str]| {
            let budgets: Vec<_> = budgets.iter().map(|text| budget(text).unwrap()).collect();
            let estimates: Vec<_> = estimates.iter().map(|text| estimate(text).unwrap()).collect();
            let settle: Vec<_> = settle.iter().map(|text| field(text).unwrap()).collect();
            let of =
                Budgets { budgets: &budgets, estimates: &estimates, settle: &settle, left: &[] };
            of.check(false).map_err(|(field, what)| format!("{field}: {what}"))
        };
        let (a, b) = ("a=5/60s", "b=5/60s");
        assert_eq!(check(&[a], &["header:x"], &["header:y"]), Ok(()));
        assert_eq!(check(&[a, b], &["a=1", "b=header:x"], &["b=header:y"]), Ok(()));
        for (budgets, estimates, settle, said) in [
            (
                &["a=5/60s,each"][..],
                &["1"][..],
                &[][..],
                "budget: the a budget is of each tenant, and there are no tenants; set fair-by, too",
            ),
            (&[a, b, "c=5/60s"], &["1"], &[], "budget: 3 budgets; expected at most 2"),
            (&[a, a], &["a=1"], &[], "budget: \"a\" is given twice; expected each name once"),
            (&[], &["1"], &[], "estimate: there is no budget; set budget, too"),
            (&[], &[], &["header:y"], "settle: there is no budget; set budget, too"),
            (
                &[a],
                &[],
                &[],
                "budget: what a request uses of the a budget is not said; set estimate, too",
            ),
            (&[a], &["b=1"], &[], "estimate: no budget is called \"b\"; expected the name of one"),
            (&[a], &["1", "2"], &[], "estimate: it is said twice of a budget; expected once"),
            (&[a], &["1", "a=2"], &[], "estimate: it is said twice of a budget; expected once"),
            (&[a], &["a=2", "1"], &[], "estimate: it is said twice of a budget; expected once"),
        ] {
            assert_eq!(check(budgets, estimates, settle), Err(said.to_owned()));
        }
        assert!(check(&[a, b], &["1"], &[]).unwrap_err().starts_with("estimate: which budget"));
        assert!(check(&[a], &["6"], &[]).unwrap_err().contains("expected 0 to 5"));
        assert!(check(&[a], &["header:x,6"], &[]).unwrap_err().contains("expected 0 to 5"));
    }
}
