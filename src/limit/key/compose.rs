//! Extractors made of others, and of closures.

use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;

use super::{HeaderKey, KeyExtractor, MissingKey};
use crate::name::Name;

impl<F, K> KeyExtractor for F
where
    F: Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    K: Into<Name>,
{
    fn extract(&self, parts: &Parts) -> Option<Name> {
        self(parts).map(Into::into)
    }
}

macro_rules! pointer {
    ($([$($generic:tt)*] $pointer:ty),*) => {$(
        impl $($generic)* KeyExtractor for $pointer {
            fn extract(&self, parts: &Parts) -> Option<Name> {
                (**self).extract(parts)
            }

            fn missing_key(&self, parts: &Parts) -> MissingKey {
                (**self).missing_key(parts)
            }

            fn missing_header(&self, parts: &Parts) -> Option<HeaderName> {
                (**self).missing_header(parts)
            }
        }
    )*};
}

// `Box<K>` and `&K` for any `K` would overlap with closures, which both pass on.
pointer!([<K: KeyExtractor + ?Sized>] Arc<K>, [] Box<dyn KeyExtractor>, [] &'static dyn KeyExtractor, [] &'static HeaderKey);

/// With `None`, all requests have one key, as with [`GlobalKey`](super::GlobalKey): for an extractor that is configured.
impl<K: KeyExtractor> KeyExtractor for Option<K> {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        self.as_ref().map_or_else(|| Some(Name::empty()), |key| key.extract(parts))
    }

    fn missing_key(&self, parts: &Parts) -> MissingKey {
        self.as_ref().map_or_else(MissingKey::default, |key| key.missing_key(parts))
    }

    fn missing_header(&self, parts: &Parts) -> Option<HeaderName> {
        self.as_ref().and_then(|key| key.missing_header(parts))
    }
}

macro_rules! tuple {
    ($($name:ident)*) => {
        impl<$($name: KeyExtractor),*> KeyExtractor for ($($name,)*) {
            #[allow(non_snake_case, reason = "named as their types are")]
            fn extract(&self, parts: &Parts) -> Option<Name> {
                let ($($name,)*) = self;
                let name = Name::empty();
                $(let name = name.join(&$name.extract(parts)?);)*
                Some(name)
            }

            /// Decided by the first extractor that finds no key.
            #[allow(non_snake_case, reason = "named as their types are")]
            fn missing_key(&self, parts: &Parts) -> MissingKey {
                let ($($name,)*) = self;
                $(if $name.extract(parts).is_none() {
                    return $name.missing_key(parts);
                })*
                MissingKey::default()
            }

            /// Of the first extractor that finds no key.
            #[allow(non_snake_case, reason = "named as their types are")]
            fn missing_header(&self, parts: &Parts) -> Option<HeaderName> {
                let ($($name,)*) = self;
                $(if $name.extract(parts).is_none() {
                    return $name.missing_header(parts);
                })*
                None
            }
        }
    };
}

tuple!(A B);
tuple!(A B C);
tuple!(A B C D);
