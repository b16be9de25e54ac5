//! Finds two versions of this crate in one stack.

use std::any::TypeId;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::Extensions;

/// What a request has in its extensions once it has passed a layer: the version, and which copy of the crate that is.
///
/// Extensions are found by their type, and the types of another version are other types. All of this one is of `std`,
/// so it is the same in each version, and must stay as it is; the length of the array keeps it apart from what others
/// insert.
type Mark = ([(); OWN], &'static str, TypeId);

const OWN: usize = 29_541;
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The first requests of a layer get the mark, and one in 128 of those after them: a mark allocates.
const MARKED_MIN: u32 = 100;

/// Marks the requests of a layer, and warns of a mark of another version.
#[derive(Debug, Default)]
pub(super) struct Versions {
    marked: AtomicU32,
    has_warned: AtomicBool,
}

impl Versions {
    /// A request comes to the layer of this name.
    #[inline]
    pub(super) fn meet(&self, extensions: &mut Extensions, layer: &str) {
        let this = TypeId::of::<Self>();
        match extensions.get::<Mark>() {
            Some(&(_, other, copy)) if copy != this => self.warn(layer, other),
            None if self.is_to_be_marked() => {
                extensions.insert::<Mark>(([(); OWN], VERSION, this));
            }
            _ => {}
        }
    }

    fn is_to_be_marked(&self) -> bool {
        let marked = self.marked.load(Ordering::Relaxed);
        if marked < MARKED_MIN {
            self.marked.store(marked + 1, Ordering::Relaxed);
            return true;
        }
        fastrand::u8(..128) == 0
    }

    fn warn(&self, layer: &str, other_version: &str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "tower_semaphore",
                layer,
                version = VERSION,
                other_version,
                "a request has passed a layer of another version of tower-semaphore, and neither knows of the other: \
                 their wait timeouts add up, and where both ask for one name, the request takes two permits of it; \
                 depend on one version"
            );
        }
    }
}
