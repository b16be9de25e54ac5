//! The cost of fair shares beside a plain semaphore: instructions of one process, and time of Redis.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use mea::admission::FairShare;
use serde::{Deserialize, Serialize};
use tower_semaphore::{Ask, Permit, Policy, Semaphore};

use super::child;
use super::counts::{can_count, counted};
use super::redis::{Redis, Usage, until_waiting};
use super::stats::alternate;
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "fair-cost";
const ON_REDIS: &str = "fair-cost-redis";

/// Acquires and drops permits, in a process whose instructions are counted.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Job {
    limiter: Limiter,
    /// The number of waiting requests, each of its own tenant; with 0, permits are free.
    waiting: u32,
    turns: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Limiter {
    Plain,
    Fair,
    /// The figures of one process alone.
    Mea,
}

pub(crate) fn run(context: &mut Context) {
    instructions(context);
}

pub(crate) fn run_on_redis(context: &mut Context) {
    let redis = Redis::start();
    runtime().block_on(async {
        let semaphore = redis.semaphore();
        uncontended(context, &redis, &semaphore).await;
        hand_overs(context, &redis, &semaphore).await;
        semaphore.shutdown().await;
    });
}

// ===== one process =====

fn instructions(context: &mut Context) {
    if !can_count() {
        let row = Row::new(CASE, "instructions of a turn, embedded", "", &[f64::NAN]);
        context.table.add(row.note("not counted: there is no valgrind"));
        return;
    }
    for (what, waiting) in [
        ("instructions of acquire and drop, embedded", 0),
        ("the same, with 10 tenants waiting", 10),
        ("the same, with 1,000 tenants waiting", 1000),
    ] {
        let [plain, fair, mea] = [Limiter::Plain, Limiter::Fair, Limiter::Mea].map(|limiter| {
            let job = |turns| child::Job::Turns(Job { limiter, waiting, turns });
            (counted(&job(1500)) - counted(&job(500))) / 1000.0
        });
        let row = Row::new(CASE, what, "", &[fair]).against("plain", &[fair], &[plain]);
        context.table.add(row.note(format!("mea: {}", number(mea))));
    }
}

pub(crate) fn child(job: &Job) {
    runtime().block_on(async {
        let Job { limiter, waiting, .. } = *job;
        let permits = if waiting == 0 { 10 } else { 1 };
        if limiter == Limiter::Mea {
            let quota = Arc::new(FairShare::new(usize::try_from(permits).expect("a few")));
            take_turns(job, |tenant| Arc::clone(&quota).acquire_owned(tenant)).await;
            return;
        }
        let semaphore = Semaphore::in_memory();
        let policy = Policy::builder(permits).wait_timeout(Policy::MAX_WAIT_TIMEOUT);
        let policy = policy.build().expect("a policy");
        // Names are made first, because they are not what is counted.
        let asks: Vec<_> = (0..=waiting).map(|n| ask("s", limiter, n)).collect();
        take_turns(job, |tenant| {
            let tenant = usize::try_from(tenant).expect("a few");
            semaphore.acquire(asks[tenant].clone(), &policy)
        })
        .await;
    });
}

fn ask(name: &str, limiter: Limiter, tenant: u32) -> Ask {
    let ask = Ask::of(name);
    if limiter == Limiter::Plain { ask } else { ask.by(self::tenant(tenant)) }
}

/// Serves each tenant in turn, and puts it at the end of the line.
async fn take_turns<F: Future>(job: &Job, acquire: impl Fn(u32) -> F) {
    let &Job { waiting, turns, .. } = job;
    if waiting == 0 {
        for _ in 0..turns {
            drop(acquire(0).await);
        }
        return;
    }
    let mut held = (0, acquire(0).await);
    let mut line = VecDeque::new();
    for tenant in 1..=waiting {
        let mut place = Box::pin(acquire(tenant));
        assert!((&mut place).now_or_never().is_none(), "there is one permit");
        line.push_back((tenant, place));
    }
    for _ in 0..turns {
        let (tenant, permit) = held;
        drop(permit);
        let (next, place) = line.pop_front().expect("some wait");
        held = (next, place.await);
        let mut place = Box::pin(acquire(tenant));
        assert!((&mut place).now_or_never().is_none(), "it has to wait for its turn");
        line.push_back((tenant, place));
    }
}

// ===== Redis =====

/// What one of several processes requests of a name.
type Maker = fn(&str, u32) -> Ask;

fn tenant(n: u32) -> String {
    format!("tenant {n}")
}

/// Returns the µs of scripts for each of `count`.
fn each(usage: Usage, count: u32) -> f64 {
    usage.per_script() * usage.scripts / f64::from(count)
}

async fn uncontended(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let rounds = context.either(600, 4000);
    let policy = Policy::new(100);
    // Beside ten that hold permits.
    let pairs = async |name: &str, ask: Maker, together: u32| {
        let acquire = |n| semaphore.acquire(ask(name, n), &policy);
        let _held = try_join_all((0..10).map(acquire)).await.expect("permits");
        let before = redis.usage();
        for _ in 0..rounds / together {
            let permits = try_join_all((0..together).map(acquire)).await.expect("permits");
            let released = permits.into_iter().map(Permit::release);
            try_join_all(released).await.expect("answers");
        }
        each(redis.usage().since(before), rounds / together)
    };
    for (what, ask, together, most) in [
        ("acquire and release: Redis' time", (|s, n| Ask::of(s).by(tenant(n))) as Maker, 1, 1.2),
        ("the same, with a cap for each", |s, n| Ask::of(s).by(tenant(n)).each(4), 1, 1.6),
        ("the same, 16 in a call", |s, n| Ask::of(s).by(tenant(n)), 16, 1.8),
    ] {
        let (fair, plain) = alternate(
            context.rounds(),
            async || pairs("fair", ask, together).await,
            async || pairs("plain", |name, _| Ask::of(name), together).await,
        )
        .await;
        let row = Row::new(ON_REDIS, what, "µs", &fair).against("plain", &fair, &plain);
        context.table.add(row.bound(Bound::RatioMost(most)));
    }
}

async fn hand_overs(context: &mut Context, redis: &Redis, semaphore: &Semaphore) {
    let mut of_tenants = Vec::new();
    for (what, tenants, depth) in [
        ("hand-over, 10 tenants waiting: Redis' time", 10, 40),
        ("hand-over, 1,000 tenants waiting", 1000, 2),
    ] {
        let (fair, plain) = alternate(
            context.rounds(),
            async || hand_over(redis, semaphore, Limiter::Fair, tenants, depth).await,
            async || hand_over(redis, semaphore, Limiter::Plain, tenants, depth).await,
        )
        .await;
        let row = Row::new(ON_REDIS, what, "µs", &fair).against("plain", &fair, &plain);
        context.table.add(row.bound(Bound::RatioMost(2.2)));
        of_tenants.push(fair);
    }
    let [ten, thousand] = &of_tenants[..] else { return };
    let row = Row::new(ON_REDIS, "hand-over, 1,000 tenants beside 10", "µs", thousand);
    context.table.add(row.against("10", thousand, ten).bound(Bound::RatioMost(1.3)));
}

/// The µs of the scripts that hand a permit over.
async fn hand_over(
    redis: &Redis,
    semaphore: &Semaphore,
    limiter: Limiter,
    tenants: u32,
    depth: u32,
) -> f64 {
    let name = if limiter == Limiter::Fair { "lines" } else { "line" };
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(30));
    let policy = policy.build().expect("a policy");
    let mut held = semaphore.acquire(ask(name, limiter, 0), &policy).await.expect("a permit");
    // Requests that join in one call have no order, so any of them may be next.
    let mut line = FuturesUnordered::new();
    for tenant in (0..depth).flat_map(|_| 0..tenants) {
        let mut place = Box::pin(semaphore.acquire(ask(name, limiter, tenant), &policy));
        assert!((&mut place).now_or_never().is_none(), "there is one permit");
        line.push(place);
    }
    let waiting = tenants * depth;
    until_waiting(semaphore, name, waiting).await;
    // Half of them, so that the number of tenants stays the same.
    let turns = (waiting / 2).min(500);
    let before = redis.usage();
    for _ in 0..turns {
        drop(held);
        held = line.next().await.expect("some wait").expect("a permit");
    }
    let usage = redis.usage().since(before);
    drop((held, line));
    until_waiting(semaphore, name, 0).await;
    each(usage, turns)
}
