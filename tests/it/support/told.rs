//! Captures `tracing` events and spans of the current thread.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// An event, or a span that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) name: String,
    pub(crate) level: Level,
    pub(crate) target: String,
    pub(crate) fields: BTreeMap<String, String>,
}

/// Everything that this thread reports, including tasks.
pub(crate) struct Told {
    shared: Arc<Shared>,
    _here: DefaultGuard,
}

#[derive(Default)]
struct Shared {
    events: Mutex<Vec<Item>>,
    open: Mutex<BTreeMap<u64, Item>>,
    spans: Mutex<Vec<Item>>,
}

impl Told {
    pub(crate) fn new() -> Self {
        // With a single dispatcher, only the thread that reaches a callsite first is asked whether it is enabled, and
        // that may be the thread of another test. So there are two.
        static ANOTHER: LazyLock<Dispatch> =
            LazyLock::new(|| Dispatch::new(NoSubscriber::default()));
        LazyLock::force(&ANOTHER);
        let shared = Arc::<Shared>::default();
        let subscriber = tracing_subscriber::registry().with(Capture(Arc::clone(&shared)));
        Self { shared, _here: tracing::subscriber::set_default(subscriber) }
    }

    /// Returns the events of this crate; the message is their name.
    pub(crate) fn events(&self) -> Vec<Item> {
        self.shared.events.lock().unwrap().clone()
    }

    /// Returns the events at `INFO` and above.
    pub(crate) fn aloud(&self) -> Vec<Item> {
        self.events().into_iter().filter(|event| event.level <= Level::INFO).collect()
    }

    pub(crate) fn spans(&self) -> Vec<Item> {
        self.shared.spans.lock().unwrap().clone()
    }
}

struct Capture(Arc<Shared>);

impl Item {
    fn new(metadata: &Metadata<'_>) -> Self {
        Self {
            name: metadata.name().to_owned(),
            level: *metadata.level(),
            target: metadata.target().to_owned(),
            fields: BTreeMap::new(),
        }
    }
}

impl Visit for Item {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.name = text,
            name => drop(self.fields.insert(name.to_owned(), text)),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// Other crates report events, too.
fn is_own(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("tower_semaphore")
}

impl<S: Subscriber> Layer<S> for Capture {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if is_own(event.metadata()) {
            let mut item = Item::new(event.metadata());
            event.record(&mut item);
            self.0.events.lock().unwrap().push(item);
        }
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        if is_own(attributes.metadata()) {
            let mut item = Item::new(attributes.metadata());
            attributes.record(&mut item);
            self.0.open.lock().unwrap().insert(id.into_u64(), item);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        if let Some(item) = self.0.open.lock().unwrap().get_mut(&id.into_u64()) {
            values.record(item);
        }
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let closed = self.0.open.lock().unwrap().remove(&id.into_u64());
        self.0.spans.lock().unwrap().extend(closed);
    }
}
