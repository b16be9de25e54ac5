//! The world of a run: Redis, the gateways, the links between them, and their faults.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::block_in_place;
use tokio::time::sleep;

use super::history::{At, Budget, Fair, Fault, Rate, Recorder, Rules, What};
use super::load::{self, Addresses, FEW, KEYS, LIMITS, LONG, ONE, PAUSED, RATED, SPENT, rule};
use super::plan::{Planned, SLOTS};
use super::servers::Servers;
use crate::support::faulty_proxy::Proxy;
use crate::support::gateway::Gateway;

pub(super) const WAIT: Duration = Duration::from_secs(3);
pub(super) const LEASE: Duration = Duration::from_secs(1);
/// How long the gateways pause at most, whatever the upstream says. The shortest leaves some time to judge.
pub(super) const MAX_PAUSES: [Duration; SLOTS] =
    [Duration::from_millis(700), Duration::from_millis(850), Duration::from_millis(1000)];
/// Redis, the gateways, and the links between them.
pub(super) struct World {
    recorder: Arc<Recorder>,
    upstream: String,
    pub(super) addresses: Addresses,
    pub(super) redis: Arc<Mutex<Servers>>,
    slots: Vec<Slot>,
    /// The configuration files of the gateways.
    configs: TempDir,
}

struct Slot {
    /// The URL by which its gateway knows Redis.
    redis: String,
    /// The proxy between the two, if there is one server.
    proxy: Option<Proxy>,
    gateway: Arc<Mutex<Option<Running>>>,
}

pub(super) struct Running {
    number: usize,
    process: Gateway,
}

/// What a fault affects while it lasts.
pub(super) enum Victim {
    Redis(OwnedMutexGuard<Servers>),
    Gateway(OwnedMutexGuard<Option<Running>>),
}

/// Returns the path of a gateway's configuration file.
fn config(configs: &TempDir, slot: usize) -> PathBuf {
    configs.path().join(format!("{slot}.toml"))
}

/// Returns the limits of a gateway. Those with a rate or a budget cannot pass permits on.
fn contents(rules: &Rules, slot: usize) -> String {
    let ms = |time: Duration| format!("{}ms", time.as_millis());
    let mut all = format!("wait = \"{}\"\nlease = \"{}\"\n", ms(WAIT), ms(LEASE));
    if rules.fair != Fair::Arrival {
        all += "fair-by = \"header:x-tenant\"\n";
    }
    if let Fair::Each(each) = rules.fair {
        all += &format!("each = {each}\n");
    }
    if let Some(also) = rules.also {
        all += &format!("also = [\"model:header:x-model={also}\"]\n");
    }
    let limits = [ONE, FEW, LONG].map(|key| format!("{} = {}", KEYS[key], LIMITS[key])).join(", ");
    let plain =
        format!("key = \"header:x-key\"\nlimit = {}\nlimit-for = {{ {limits} }}\n", LIMITS[FEW]);
    let rated = format!("limit = {}\n", LIMITS[RATED]);
    let pause = ms(MAX_PAUSES[slot]);
    let mut paused =
        format!("limit = {}\npause-on = \"429\"\nmax-pause = \"{pause}\"\n", LIMITS[PAUSED]);
    if rules.is_adaptive(PAUSED) {
        paused += &format!("adaptive = \"1..{}\"\n", LIMITS[PAUSED]);
    }
    let mut contents = String::new();
    let mut spent = format!("limit = {}\n", LIMITS[SPENT]);
    if let Some(Budget { burst, refill, .. }) = rules.budgets[SPENT] {
        let each = if rules.fair == Fair::Arrival { "" } else { ",each" };
        spent += &format!("budget = [\"tokens={burst}/{}ms{each}\"]\n", refill / 1000);
        spent += "estimate = [\"header:x-estimate\"]\nsettle = [\"header:x-used\"]\n";
    }
    for (key, own) in [(ONE, plain), (RATED, rated), (PAUSED, paused), (SPENT, spent)] {
        let name = rule(key);
        contents += &format!("[[rule]]\nname = \"{name}\"\nprefix = \"/{name}\"\n{own}{all}");
        if let Some(Rate { starts, window }) = rules.rates[key] {
            contents += &format!("rate = \"{starts}/{}ms\"\n", window / 1000);
        } else if slot < rules.reuse && key != SPENT {
            contents += "reuse = true\n";
        }
    }
    contents
}

impl World {
    pub(super) async fn start(recorder: Arc<Recorder>) -> Arc<Self> {
        let rules = recorder.lock().rules.clone();
        let upstream = load::upstream(Arc::clone(&recorder)).await;
        let redis = block_in_place(|| Servers::start(rules.shape));
        let (configs, mut slots) = (TempDir::new().unwrap(), Vec::new());
        for slot in 0..SLOTS {
            std::fs::write(config(&configs, slot), contents(&rules, slot)).unwrap();
            let (redis, proxy) = match redis.url() {
                Some(url) => (url, None),
                None => {
                    let proxy = Proxy::start(redis.one().port()).await;
                    (format!("redis://{}/", proxy.address()), Some(proxy))
                }
            };
            slots.push(Slot { redis, proxy, gateway: Arc::default() });
        }
        let world = Arc::new(Self {
            recorder,
            upstream,
            addresses: Arc::new(StdMutex::new([None; SLOTS])),
            redis: Arc::new(Mutex::new(redis)),
            slots,
            configs,
        });
        for slot in 0..SLOTS {
            let mut gateway = Arc::clone(&world.slots[slot].gateway).lock_owned().await;
            world.start_gateway(slot, &mut gateway).await;
        }
        world
    }

    async fn start_gateway(&self, slot: usize, to: &mut Option<Running>) -> usize {
        let redis = self.slots[slot].redis.clone();
        let config = config(&self.configs, slot);
        let args = ["--redis", &redis, "--config", config.to_str().unwrap()];
        let process = block_in_place(|| Gateway::start(&self.upstream, &args));
        let address: SocketAddr = process.url().strip_prefix("http://").unwrap().parse().unwrap();
        let number = self.recorder.born();
        *to = Some(Running { number, process });
        self.addresses.lock().unwrap()[slot] = Some((number, address));
        number
    }

    /// Returns the present process of each gateway.
    pub(super) async fn pids(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        for slot in &self.slots {
            pids.extend(slot.gateway.lock().await.as_ref().map(|running| running.process.pid()));
        }
        pids
    }

    /// Takes what the fault affects, in the order of the schedule, one fault at a time.
    pub(super) async fn victim(&self, planned: &Planned) -> Victim {
        match planned.slot {
            Some(slot) => Victim::Gateway(Arc::clone(&self.slots[slot].gateway).lock_owned().await),
            None => Victim::Redis(Arc::clone(&self.redis).lock_owned().await),
        }
    }

    /// Carries out a fault, from its beginning to its end.
    pub(super) async fn happen(&self, planned: Planned, mut victim: Victim) {
        let mut fault = Fault {
            what: planned.what,
            gateway: match &victim {
                Victim::Gateway(running) => running.as_ref().map(|running| running.number),
                Victim::Redis(_) => None,
            },
            keys: Vec::new(),
            heir: None,
            begin: self.recorder.now(),
            end: 0,
        };
        // Known while it lasts, in case the run ends badly.
        let index = {
            let mut run = self.recorder.lock();
            run.faults.push(Fault { end: At::MAX, ..fault.clone() });
            run.faults.len() - 1
        };
        fault.end = match &mut victim {
            Victim::Redis(redis) => redis.befall(&planned, &mut fault, &self.recorder).await,
            Victim::Gateway(running) => self.befall_gateway(&planned, running, &mut fault).await,
        };
        self.recorder.lock().faults[index] = fault;
    }

    /// Returns when it was over.
    async fn befall_gateway(
        &self,
        planned: &Planned,
        running: &mut Option<Running>,
        fault: &mut Fault,
    ) -> At {
        let slot = planned.slot.unwrap();
        let proxy = || self.slots[slot].proxy.as_ref().expect("where there is one server");
        match planned.what {
            What::KillGateway => {
                if let Some(Running { number, mut process }) = running.take() {
                    let died = self.recorder.now();
                    self.recorder.lock().gateways[number].died = Some(died);
                    self.addresses.lock().unwrap()[slot] = None;
                    block_in_place(|| process.kill());
                }
                sleep(planned.lasts).await;
                fault.heir = Some(self.start_gateway(slot, running).await);
            }
            What::FreezeGateway => {
                let process = &running.as_ref().unwrap().process;
                block_in_place(|| process.signal("STOP"));
                // Only now, because on a busy machine it takes a while to send a signal.
                fault.begin = self.recorder.now();
                sleep(planned.lasts).await;
                // The time before: what happens after waking comes after it.
                let end = self.recorder.now();
                block_in_place(|| process.signal("CONT"));
                return end;
            }
            What::Delay => {
                proxy().delay(Duration::from_millis(planned.strength));
                sleep(planned.lasts).await;
                proxy().delay(Duration::ZERO);
            }
            What::Stall | What::StallCut => {
                proxy().stall(true);
                sleep(planned.lasts).await;
                if planned.what == What::StallCut {
                    proxy().cut();
                }
                proxy().stall(false);
            }
            What::Cut => proxy().cut(),
            What::HalfClose => proxy().half_close(planned.strength == 1),
            what => unreachable!("{what:?} befalls all"),
        }
        self.recorder.now()
    }
}
